/* Attention of rows of one token, straight from the pages. A template; see elementwise.h.
 *
 * Idea. A row is bound by reading its keys and values, so the walk follows memory: runs of 64 keys, within a run all heads,
 * within a head all queries of its group. The softmax is kept open (maximum, sum, weighted values) from run to run, and may
 * start from the state that a group's shared keys left. Traffic: K and V of the context once. The same place of the next run
 * is fetched while this one is computed, in the order of addresses.
 */

typedef struct {
    const element *key[RUN_KEYS], *value[RUN_KEYS];
    int count;
} FN(Keys);

static void FN(find_run)(FN(Keys) * run, const Attention *a, const int32_t *table, int64_t first, int64_t last)
{
    run->count = last - first < RUN_KEYS ? last - first : RUN_KEYS;
    for (int i = 0; i < run->count; i++) {
        int64_t block = (first + i) / a->block_size, slot = (first + i) % a->block_size;
        int64_t offset = table[block] * a->block_stride + slot * a->token_stride;
        run->key[i] = (const element *)a->keys + offset;
        run->value[i] = (const element *)a->values + offset;
    }
}

/* Lines of a run still to be fetched: rows of keys, then rows of values. */
typedef struct {
    const FN(Keys) *run;
    int row;
    int64_t at, offset, width; /* elements */
} FN(Fetch);

static inline void FN(fetch_lines)(FN(Fetch) *f, int count)
{
    for (; count > 0 && f->row < 2 * f->run->count; count--) {
        const element *row = f->row < f->run->count ? f->run->key[f->row] : f->run->value[f->row - f->run->count];
        __builtin_prefetch(row + f->offset + f->at, 0, 2);
        f->at += 64 / sizeof(element);
        if (f->at >= f->width) {
            f->at = 0;
            f->row++;
        }
    }
}

/* One query head over one run. `query` is scaled, `state` is [head_dim + STATE_EXTRA]. Fetches `lines` a key. */
static inline void FN(attend_head)(const FN(Keys) * run, int64_t offset, const float *query, float *state, int64_t dim,
                                   FN(Fetch) *fetch, int lines)
{
    float scores[RUN_KEYS];
    for (int i = 0; i < run->count; i++) {
        vf sum = vf_set1(0);
        FN(fetch_lines)(fetch, lines);
        for (int64_t d = 0; d < dim; d += LANES)
            sum = vf_fma(vf_load_f32(query + d), LOAD(run->key[i] + offset + d), sum);
        scores[i] = vf_sum(sum);
    }
    for (int i = run->count; i % LANES; i++)
        scores[i] = -1e30f;
    float *open = state + dim;
    vf maximum = vf_set1(open[STATE_MAXIMUM]), largest = maximum, sum = vf_set1(0);
    for (int i = 0; i < run->count; i += LANES)
        largest = vf_max(largest, vf_load_f32(scores + i));
    largest = vf_set1(vf_largest(largest));
    for (int i = 0; i < run->count; i += LANES) {
        vf weight = vf_exp2(vf_sub(vf_load_f32(scores + i), largest));
        vf_store_f32(scores + i, weight);
        sum = vf_add(sum, weight);
    }
    vf shrink = vf_exp2(vf_sub(maximum, largest));
    for (int64_t d = 0; d < dim; d += LANES) {
        vf values = vf_mul(vf_load_f32(state + d), shrink);
        for (int i = 0; i < run->count; i++)
            values = vf_fma(vf_set1(scores[i]), LOAD(run->value[i] + offset + d), values);
        vf_store_f32(state + d, values);
    }
    float before[LANES];
    vf_store_f32(before, shrink);
    open[STATE_SUM] = open[STATE_SUM] * before[0] + vf_sum(sum);
    vf_store_f32(before, largest);
    open[STATE_MAXIMUM] = before[0];
}

static void FN(attend_row)(const Attention *a, const int32_t *tables, const Decode *row, const Decode *next, int64_t first_head,
                           int64_t last_head, const float *queries, float *states)
{
    const int64_t dim = a->head_dim, group = a->num_heads / a->num_kv_heads;
    /* So many that a run is fetched while one like it is computed. */
    const int lines = (2 * dim * sizeof(element) + 64 * group - 1) / (64 * group);
    FN(Keys) runs[2];
    FN(find_run)(&runs[0], a, tables + row->table, row->shared, row->context);
    for (int64_t first = row->shared, turn = 0; first < row->context; first += RUN_KEYS, turn ^= 1) {
        const FN(Keys) *run = &runs[turn];
        FN(Keys) *ahead = &runs[turn ^ 1];
        ahead->count = 0;
        if (first + RUN_KEYS < row->context)
            FN(find_run)(ahead, a, tables + row->table, first + RUN_KEYS, row->context);
        else if (next)
            FN(find_run)(ahead, a, tables + next->table, next->shared, next->context);
        FN(Fetch) fetch = {ahead, 0, 0, first_head * dim, (last_head - first_head) * dim};
        for (int64_t g = first_head * group; g < last_head * group; g++)
            FN(attend_head)(run, g / group * dim, queries + g * dim, states + g * (dim + STATE_EXTRA), dim, &fetch, lines);
    }
}

static void FN(attend_decodes)(const Attention *a, const int32_t *tables, const Decode *rows, int64_t first, int64_t last,
                               int64_t first_kv_head, int64_t last_kv_head, void *scratch)
{
    const int64_t dim = a->head_dim, group = a->num_heads / a->num_kv_heads, width = dim + STATE_EXTRA;
    const vf scale = vf_set1(LOG2E / sqrtf(dim));
    float *queries = scratch, *own = queries + a->num_heads * dim;
    for (int64_t b = first; b < last; b++) {
        const Decode *row = &rows[b];
        const element *query = (const element *)a->queries + row->token * a->query_stride;
        float *states = row->shared ? a->state + b * a->num_heads * width : own;
        for (int64_t h = first_kv_head * group; h < last_kv_head * group; h++) {
            for (int64_t d = 0; d < dim; d += LANES)
                vf_store_f32(queries + h * dim + d, vf_mul(scale, LOAD(query + h * dim + d)));
            if (!row->shared) {
                memset(own + h * width, 0, width * sizeof(float));
                own[h * width + dim + STATE_MAXIMUM] = -1e30f;
            }
        }
        FN(attend_row)(a, tables, row, b + 1 < last ? row + 1 : NULL, first_kv_head, last_kv_head, queries, states);
        for (int64_t h = first_kv_head * group; h < last_kv_head * group; h++) {
            const vf inverse = vf_set1(1 / states[h * width + dim + STATE_SUM]);
            element *output = (element *)a->output + (row->token * a->num_heads + h) * dim;
            for (int64_t d = 0; d < dim; d += LANES)
                STORE(output + d, vf_mul(inverse, vf_load_f32(states + h * width + d)));
        }
    }
}
