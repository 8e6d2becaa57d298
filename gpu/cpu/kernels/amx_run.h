/* attention_run.h on AMX, bf16: many query rows against one run of keys.
 *
 * Idea. Transposed, like there: scores [32 keys, 32 queries] = K x Q^T, where a page of keys is an A tile as it lies in the
 * pool and Q^T a B tile made once per 32 queries. The softmax runs along tile rows, its weights leave the registers as the
 * pairs that a B tile wants, and output [dim, 32 queries] += V^T x P^T with V^T packed once per run and head. Sums shrink
 * only when the largest score outgrows the maximum by SLACK: a weight may be larger than 1, floats have room for it.
 * Tiles and vectors take turns: on this hardware 512-bit instructions do not run beside tile products (measured; 256-bit ones
 * do, at half the width), so nothing is gained by mixing them.
 * Traffic: K and V of the run once from memory, then from L2, past L1, which holds the 32 queries' working set, for each 32
 * queries; keys past their last limit are not touched.
 */

enum { AMX_KEYS = 64, MAX_DIM = 256 }; /* keys per step of the softmax; largest head_dim */
enum { SLACK = 8 }; /* powers of 2 */

/* A run's keys as 16-row tiles: in the pages where a page is whole tiles, else in a copy (no table). */
typedef struct {
    const bf16 *keys;
    const int32_t *table;
    int64_t block_size, block_stride, token_stride, count;
} KeyTiles;

static inline const bf16 *key_tile(const KeyTiles *k, int64_t tile)
{
    tile = tile < k->count ? tile : k->count - 1;
    if (!k->table)
        return k->keys + tile * 16 * k->token_stride;
    uint32_t first = tile * 16, block = first / (uint32_t)k->block_size, slot = first % (uint32_t)k->block_size;
    return k->keys + k->table[block] * k->block_stride + slot * k->token_stride;
}

static inline int64_t pool_offset(const Attention *a, const int32_t *table, int64_t key)
{
    uint32_t block = (uint32_t)key / (uint32_t)a->block_size, slot = (uint32_t)key % (uint32_t)a->block_size;
    return table[block] * a->block_stride + slot * a->token_stride;
}

static KeyTiles find_keys(const Attention *a, const Run *run, bf16 *copy)
{
    const int64_t dim = a->head_dim, count = (run->keys + 15) / 16;
    const bf16 *keys = (const bf16 *)a->keys + run->kv_head * dim;
    if (a->block_size % 16 == 0)
        return (KeyTiles){keys, run->table, a->block_size, a->block_stride, a->token_stride, count};
    for (int64_t t = 0; t < run->keys; t++)
        memcpy(copy + t * dim, keys + pool_offset(a, run->table, t), dim * sizeof(bf16));
    return (KeyTiles){copy, NULL, 0, 0, dim, count};
}

/* Fetches values further on, and the keys of this place, which are multiplied once all values are packed. A page holds
 * a head's part of each token apart from the next one's, which the CPU's own prefetching does not follow. What this step has
 * written itself is in the cache. */
INLINE void fetch_ahead(const Attention *a, const Run *run, int64_t first)
{
    enum { AHEAD = 64 };
    const int64_t written_before = run->members ? run->keys : run->first_limit - 1, head = run->kv_head * a->head_dim;
    for (int64_t key = first; key < first + 32 && key < written_before; key++) {
        const int64_t later = key + AHEAD < written_before ? key + AHEAD : key;
        fetch_lines((const bf16 *)a->keys + pool_offset(a, run->table, key) + head, a->head_dim / 32);
        fetch_lines((const bf16 *)a->values + pool_offset(a, run->table, later) + head, a->head_dim / 32);
    }
}

/* V^T as A tiles [keys / 32][dim / 16]: row = dimension, columns = 32 keys. Zeros past the run: 0 times stale might be NaN. */
static void pack_values(const Attention *a, const Run *run, bf16 *packed)
{
    const int64_t dim = a->head_dim;
    for (int64_t first = 0; first < run->keys; first += 32) {
        fetch_ahead(a, run, first);
        const bf16 *rows[32];
        for (int i = 0; i < 32; i++)
            rows[i] = first + i < run->keys
                          ? (const bf16 *)a->values + pool_offset(a, run->table, first + i) + run->kv_head * dim : NULL;
        for (int64_t d = 0; d < dim; d += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) {
                __m512i even = _mm512_setzero_si512(), odd = even;
                if (rows[2 * i])
                    even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows[2 * i] + d)));
                if (rows[2 * i + 1])
                    odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(rows[2 * i + 1] + d)));
                r[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
            }
            transpose(r);
            for (int i = 0; i < 16; i++, packed += 32)
                _mm512_store_si512(packed, r[i]);
        }
    }
}

typedef struct {
    int64_t token, state, head, limit;
} Place;

/* The working set of 32 queries. */
typedef struct {
    alignas(64) uint32_t queries[MAX_DIM / 32][2][256]; /* B tiles */
    alignas(64) float scores[AMX_KEYS][32];
    alignas(64) uint32_t weights[AMX_KEYS / 32][2][256]; /* B tiles */
    alignas(64) float sums[MAX_DIM][32];
    alignas(64) int32_t limits[32];
    alignas(64) float maximum[32], sum[32];
    Place places[32];
} Queries;

/* Query row `r` of a run, token by token and head by head within one. */
static inline Place place_of(const Attention *a, const Run *run, int64_t r)
{
    const int64_t group = a->num_heads / a->num_kv_heads, i = r / group, head = run->kv_head * group + r % group;
    if (!run->members)
        return (Place){run->token + i, 0, head, run->first_limit + i};
    return (Place){run->decodes[run->members[i]].token, run->members[i] * a->num_heads + head, head, run->keys};
}

static void load_queries(const Attention *a, const Run *run, int64_t first, Queries *q)
{
    const bf16 *rows[32];
    for (int i = 0; i < 32; i++) {
        int64_t r = first + i < run->last_query ? first + i : run->last_query - 1;
        const Place place = q->places[i] = place_of(a, run, r);
        rows[i] = (const bf16 *)a->queries + place.token * a->query_stride + place.head * a->head_dim;
        q->limits[i] = place.limit;
    }
    for (int64_t step = 0; step < a->head_dim / 32; step++)
        for (int half = 0; half < 2; half++) {
            __m512i r[16];
            for (int i = 0; i < 16; i++)
                r[i] = _mm512_loadu_si512(rows[half * 16 + i] + step * 32);
            transpose(r);
            for (int i = 0; i < 16; i++)
                _mm512_store_si512(&q->queries[step][half][i * 16], r[i]);
        }
    for (int half = 0; half < 2; half++) {
        _mm512_store_ps(q->maximum + 16 * half, _mm512_set1_ps(-1e30f));
        _mm512_store_ps(q->sum + 16 * half, _mm512_setzero_ps());
    }
    memset(q->sums, 0, a->head_dim * sizeof q->sums[0]);
}

/* scores of 32 keys from `first` on */
static inline void multiply_keys(const KeyTiles *keys, int64_t first, Queries *q, float (*scores)[32], int64_t dim)
{
    const bf16 *low = key_tile(keys, first / 16), *high = key_tile(keys, first / 16 + 1);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < dim / 32; step++) {
        _tile_stream_loadd(4, low + step * 32, keys->token_stride * 2);
        _tile_stream_loadd(5, high + step * 32, keys->token_stride * 2);
        _tile_loadd(6, q->queries[step][0], 64);
        _tile_loadd(7, q->queries[step][1], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, scores[0], 128);
    _tile_stored(1, scores[0] + 16, 128);
    _tile_stored(2, scores[16], 128);
    _tile_stored(3, scores[16] + 16, 128);
}

static inline void hide_keys(Queries *q, int64_t first, int64_t count)
{
    for (int64_t t = 0; t < count; t++)
        for (int half = 0; half < 2; half++) {
            __mmask16 visible = _mm512_cmpgt_epi32_mask(_mm512_load_si512(q->limits + 16 * half), _mm512_set1_epi32(first + t));
            float *score = q->scores[t] + 16 * half;
            _mm512_store_ps(score, _mm512_mask_blend_ps(visible, _mm512_set1_ps(-1e30f), _mm512_load_ps(score)));
        }
}

static inline vf column_maximum(const float *scores, int64_t count)
{
    vf a = _mm512_set1_ps(-1e30f), b = a, c = a, d = a;
    for (int64_t t = 0; t < count; t += 4, scores += 4 * 32) {
        a = _mm512_max_ps(a, _mm512_load_ps(scores));
        b = _mm512_max_ps(b, _mm512_load_ps(scores + 32));
        c = _mm512_max_ps(c, _mm512_load_ps(scores + 64));
        d = _mm512_max_ps(d, _mm512_load_ps(scores + 96));
    }
    return _mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d));
}

/* A larger maximum for one half of the queries. */
static void raise_maximum(Queries *q, int half, vf maximum, int64_t dim)
{
    float *sums = q->sums[0] + 16 * half, *sum = q->sum + 16 * half;
    const vf shrink = exp2_for_bf16(_mm512_sub_ps(_mm512_load_ps(q->maximum + 16 * half), maximum));
    _mm512_store_ps(q->maximum + 16 * half, maximum);
    _mm512_store_ps(sum, _mm512_mul_ps(shrink, _mm512_load_ps(sum)));
    for (int64_t d = 0; d < dim; d++)
        _mm512_store_ps(sums + d * 32, _mm512_mul_ps(shrink, _mm512_load_ps(sums + d * 32)));
}

/* Scores become weights in pairs, for one half of the queries. */
static inline void open_softmax(Queries *q, int half, int64_t count, vf scale, int64_t dim)
{
    const float *scores = q->scores[0] + 16 * half;
    vf maximum = _mm512_load_ps(q->maximum + 16 * half), largest = _mm512_mul_ps(scale, column_maximum(scores, count));
    if (_mm512_cmp_ps_mask(largest, _mm512_add_ps(maximum, _mm512_set1_ps(SLACK)), _CMP_NLE_UQ)) {
        maximum = _mm512_max_ps(maximum, largest);
        raise_maximum(q, half, maximum, dim);
    }
    vf sum = _mm512_load_ps(q->sum + 16 * half);
    vf other = _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t += 4, scores += 4 * 32) {
        vf a = exp2_for_bf16(_mm512_fmsub_ps(_mm512_load_ps(scores), scale, maximum));
        vf b = exp2_for_bf16(_mm512_fmsub_ps(_mm512_load_ps(scores + 32), scale, maximum));
        vf c = exp2_for_bf16(_mm512_fmsub_ps(_mm512_load_ps(scores + 64), scale, maximum));
        vf d = exp2_for_bf16(_mm512_fmsub_ps(_mm512_load_ps(scores + 96), scale, maximum));
        sum = _mm512_add_ps(sum, _mm512_add_ps(a, b));
        other = _mm512_add_ps(other, _mm512_add_ps(c, d));
        uint32_t *weights = &q->weights[t / 32][half][t % 32 / 2 * 16];
        _mm512_store_si512(weights, pairs(a, b));
        _mm512_store_si512(weights + 16, pairs(c, d));
    }
    _mm512_store_ps(q->sum + 16 * half, _mm512_add_ps(sum, other));
}

static inline void add_values(const bf16 *values, Queries *q, int64_t first, int64_t count, int64_t dim)
{
    for (int64_t d = 0; d < dim / 16; d += 2) {
        float *low = q->sums[d * 16], *high = q->sums[d * 16 + 16];
        _tile_loadd(0, low, 128);
        _tile_loadd(1, low + 16, 128);
        _tile_loadd(2, high, 128);
        _tile_loadd(3, high + 16, 128);
        for (int64_t t = 0; t < count; t += 32) {
            const bf16 *v = values + ((first + t) / 32 * (dim / 16) + d) * TILE;
            _tile_stream_loadd(4, v, 64);
            _tile_stream_loadd(5, v + TILE, 64);
            _tile_loadd(6, q->weights[t / 32][0], 64);
            _tile_loadd(7, q->weights[t / 32][1], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, low, 128);
        _tile_stored(1, low + 16, 128);
        _tile_stored(2, high, 128);
        _tile_stored(3, high + 16, 128);
    }
}

/* Outputs, or for a group its members' states. */
static void write_queries(const Attention *a, const Run *run, int64_t first, const Queries *q)
{
    const int64_t dim = a->head_dim;
    for (int half = 0; half < 2; half++) {
        vf scale = run->members ? _mm512_set1_ps(1) : _mm512_div_ps(_mm512_set1_ps(1), _mm512_load_ps(q->sum + 16 * half));
        for (int64_t d = 0; d < dim; d += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; i++)
                r[i] = _mm512_castps_si512(_mm512_mul_ps(scale, _mm512_load_ps(q->sums[d + i] + 16 * half)));
            transpose(r);
            for (int i = 0; i < 16 && first + 16 * half + i < run->last_query; i++) {
                const Place place = q->places[16 * half + i];
                vf values = _mm512_castsi512_ps(r[i]);
                if (run->members) {
                    float *state = a->state + place.state * (dim + STATE_EXTRA);
                    _mm512_storeu_ps(state + d, values);
                    state[dim + STATE_MAXIMUM] = q->maximum[16 * half + i];
                    state[dim + STATE_SUM] = q->sum[16 * half + i];
                } else {
                    vf_store_bf16((bf16 *)a->output + (place.token * a->num_heads + place.head) * dim + d, values);
                }
            }
        }
    }
}

static void attend_run_amx(const Attention *a, const Run *run, void *scratch)
{
    const int64_t dim = a->head_dim, padded = (run->keys + 31) / 32 * 32;
    const vf scale = _mm512_set1_ps(LOG2E / sqrtf(dim));
    bf16 *values = scratch;
    Queries q;
    _tile_loadconfig(&whole_tiles);
    KeyTiles keys = find_keys(a, run, values + padded * dim);
    pack_values(a, run, values);
    for (int64_t first = run->first_query; first < run->last_query; first += 32) {
        load_queries(a, run, first, &q);
        int64_t end = (q.limits[31] + 31) / 32 * 32; /* limits rise with the rows */
        for (int64_t key = 0; key < end; key += AMX_KEYS) {
            int64_t count = end - key < AMX_KEYS ? end - key : AMX_KEYS;
            FENCE;
            for (int64_t t = 0; t < count; t += 32)
                multiply_keys(&keys, key + t, &q, q.scores + t, dim);
            FENCE;
            if (key + count > q.limits[0])
                hide_keys(&q, key, count);
            open_softmax(&q, 0, count, scale, dim);
            open_softmax(&q, 1, count, scale, dim);
            FENCE;
            add_values(values, &q, key, count, dim);
            FENCE;
        }
        write_queries(a, run, first, &q);
    }
    _tile_release();
}
