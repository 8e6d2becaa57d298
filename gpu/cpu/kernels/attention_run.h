/* Attention of many query rows against one run of keys: prefill chunks, and the shared part of a group's decodes.
 * A template; see elementwise.h.
 *
 * Idea. Everything is computed transposed: scores [keys, queries] = K x Q^T and output [dim, queries] += V^T x P^T, with two
 * vectors of queries. The softmax then runs along vectors, with no horizontal step, and both products are the block of
 * linear.h with queries as the panel. Keys and values of the head are first gathered from the pages into floats (keys in
 * blocks of BLOCK_ROWS, transposed), which is a few percent of the work and takes any block size. Traffic: K and V of the
 * run once from memory, then from L2 for each 2 vectors of queries; keys past a block's last limit are not touched.
 */

typedef struct {
    float *keys;   /* [keys / BLOCK_ROWS][head_dim][BLOCK_ROWS] */
    float *values; /* [keys, head_dim] */
    float *query;  /* [head_dim][2 * LANES], scaled */
    float *sums;   /* [head_dim][2 * LANES] */
} FN(RunScratch);

/* Copies the run's keys and values of one head. Zeros up to a multiple of STEP_KEYS: nothing stale may meet a weight of 0. */
static void FN(gather)(const Attention *a, const Run *run, const FN(RunScratch) * s)
{
    const int64_t dim = a->head_dim, padded = (run->keys + STEP_KEYS - 1) / STEP_KEYS * STEP_KEYS;
    for (int64_t t = 0; t < padded; t++) {
        float *key = s->keys + t / BLOCK_ROWS * BLOCK_ROWS * dim + t % BLOCK_ROWS, *value = s->values + t * dim;
        int64_t offset = 0;
        if (t < run->keys)
            offset = run->table[t / a->block_size] * a->block_stride + t % a->block_size * a->token_stride + run->kv_head * dim;
        const element *from_key = (const element *)a->keys + offset, *from_value = (const element *)a->values + offset;
        for (int64_t d = 0; d < dim; d++) {
            key[d * BLOCK_ROWS] = t < run->keys ? TO_FLOAT(from_key[d]) : 0;
            value[d] = t < run->keys ? TO_FLOAT(from_value[d]) : 0;
        }
    }
}

/* out[rows][2 vectors] = or += x x panel, `count` rows in blocks. */
static void FN(product)(float *out, bool adds, const float *x, int64_t x_step, int64_t block_stride, const float *panel,
                        int64_t depth, int64_t count)
{
    for (int64_t row = 0; row < count; row += BLOCK_ROWS, x += block_stride) {
        vf sums[BLOCK_ROWS][2];
        int rows = count - row < BLOCK_ROWS ? count - row : BLOCK_ROWS;
        for (int r = 0; r < BLOCK_ROWS; r++)
            for (int v = 0; v < 2; v++)
                sums[r][v] = adds && r < rows ? vf_load_f32(out + (row + r) * 2 * LANES + v * LANES) : vf_set1(0);
        /* The last block may read past its rows: callers leave room for it. */
        multiply_block_f32(BLOCK_ROWS, sums, x, x_step, panel, depth, false);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++)
                vf_store_f32(out + (row + r) * 2 * LANES + v * LANES, sums[r][v]);
    }
}

/* One step of the softmax for one vector of queries: scores become weights, sums shrink to the new maximum. */
static void FN(open_softmax)(float *scores, int64_t first_key, bool masks, vf limits, vf *maximum, vf *sum, float *sums,
                             int64_t dim)
{
    vf largest = *maximum;
    for (int t = 0; t < STEP_KEYS; t++) {
        vf score = vf_load_f32(scores + t * 2 * LANES);
        if (masks)
            vf_store_f32(scores + t * 2 * LANES, score = vf_visible(score, limits, first_key + t));
        largest = vf_max(largest, score);
    }
    vf shrink = vf_exp2(vf_sub(*maximum, largest)), added = vf_set1(0);
    for (int t = 0; t < STEP_KEYS; t++) {
        vf weight = vf_exp2(vf_sub(vf_load_f32(scores + t * 2 * LANES), largest));
        vf_store_f32(scores + t * 2 * LANES, weight);
        added = vf_add(added, weight);
    }
    for (int64_t d = 0; d < dim; d++)
        vf_store_f32(sums + d * 2 * LANES, vf_mul(shrink, vf_load_f32(sums + d * 2 * LANES)));
    *sum = vf_fma(*sum, shrink, added);
    *maximum = largest;
}

/* The place of query row `r`, token by token and head by head within one. */
typedef struct {
    int64_t token, state, head, limit;
} FN(Place);

static inline FN(Place) FN(place)(const Attention *a, const Run *run, int64_t r)
{
    const int64_t group = a->num_heads / a->num_kv_heads, i = r / group, head = run->kv_head * group + r % group;
    if (!run->members)
        return (FN(Place)){run->token + i, 0, head, run->first_limit + i};
    return (FN(Place)){run->decodes[run->members[i]].token, run->members[i] * a->num_heads + head, head, run->keys};
}

static void FN(write_query)(const Attention *a, const Run *run, const FN(RunScratch) * s, FN(Place) place, int lane,
                            float maximum, float sum)
{
    const int64_t dim = a->head_dim;
    if (run->members) {
        float *state = a->state + place.state * (dim + STATE_EXTRA);
        for (int64_t d = 0; d < dim; d++)
            state[d] = s->sums[d * 2 * LANES + lane];
        state[dim + STATE_MAXIMUM] = maximum;
        state[dim + STATE_SUM] = sum;
        return;
    }
    element *output = (element *)a->output + (place.token * a->num_heads + place.head) * dim;
    for (int64_t d = 0; d < dim; d++)
        output[d] = FROM_FLOAT(s->sums[d * 2 * LANES + lane] / sum);
}

/* Two vectors of query rows, from `first` on. */
static void FN(attend_queries)(const Attention *a, const Run *run, const FN(RunScratch) * s, int64_t first)
{
    const int64_t dim = a->head_dim;
    const int count = run->last_query - first < 2 * LANES ? run->last_query - first : 2 * LANES;
    const float scale = LOG2E / sqrtf(dim);
    float limits[2 * LANES], scores[STEP_KEYS * 2 * LANES], largest[2 * LANES], total[2 * LANES];
    for (int lane = 0; lane < 2 * LANES; lane++) {
        FN(Place) place = FN(place)(a, run, first + (lane < count ? lane : count - 1));
        const element *query = (const element *)a->queries + place.token * a->query_stride + place.head * dim;
        for (int64_t d = 0; d < dim; d++)
            s->query[d * 2 * LANES + lane] = scale * TO_FLOAT(query[d]);
        limits[lane] = place.limit;
    }
    memset(s->sums, 0, dim * 2 * LANES * sizeof(float));
    vf maximum[2] = {vf_set1(-1e30f), vf_set1(-1e30f)}, sum[2] = {vf_set1(0), vf_set1(0)};
    /* Limits rise with the rows. */
    for (int64_t key = 0; key < limits[2 * LANES - 1]; key += STEP_KEYS) {
        FN(product)(scores, false, s->keys + key * dim, BLOCK_ROWS, BLOCK_ROWS * dim, s->query, dim, STEP_KEYS);
        for (int v = 0; v < 2; v++)
            FN(open_softmax)(scores + v * LANES, key, key + STEP_KEYS > limits[0], vf_load_f32(limits + v * LANES), &maximum[v],
                             &sum[v], s->sums + v * LANES, dim);
        FN(product)(s->sums, true, s->values + key * dim, dim, BLOCK_ROWS, scores, STEP_KEYS, dim);
    }
    for (int v = 0; v < 2; v++) {
        vf_store_f32(largest + v * LANES, maximum[v]);
        vf_store_f32(total + v * LANES, sum[v]);
    }
    for (int lane = 0; lane < count; lane++)
        FN(write_query)(a, run, s, FN(place)(a, run, first + lane), lane, largest[lane], total[lane]);
}

static void FN(attend_run)(const Attention *a, const Run *run, void *scratch)
{
    const int64_t dim = a->head_dim, padded = (run->keys + STEP_KEYS - 1) / STEP_KEYS * STEP_KEYS;
    FN(RunScratch) s;
    s.query = scratch;
    s.sums = s.query + dim * 2 * LANES;
    s.keys = s.sums + dim * 2 * LANES;
    s.values = s.keys + padded * dim;
    FN(gather)(a, run, &s);
    for (int64_t first = run->first_query; first < run->last_query; first += 2 * LANES)
        FN(attend_queries)(a, run, &s, first);
}
