/* attention_decode.h on AMX, bf16: rows of one token, straight from the pages.
 *
 * Idea. KV heads are taken in packs whose query heads fill the 16 columns of a tile. Scores of 16 keys are one accumulator for
 * the whole pack: each KV head's B tiles hold its own queries and zeros elsewhere, so the heads' products add up side by side.
 * The softmax then runs along vectors of 16 heads. Values are weighed by AVX512_BF16 dot products over pairs of keys, since
 * V lies in rows and would have to be rearranged for a tile. Steps of 64 keys, four pages of accumulators at once.
 * Traffic: K and V of the context once. The same place AHEAD pages later, in the next row where this one ends, is fetched
 * beside the arithmetic on values, two keys at a time: a page's worth in a burst would leave memory idle afterwards.
 *
 * Unpacking pairs of rows splits 32 values into (0-3, 8-11, 16-19, 24-27) and (4-7, 12-15, ...): sums live in that order,
 * and come out of it at the end.
 */

enum { PAGES = 4, AHEAD = 5, MAX_LANES = 16, MAX_QUERY_TILES = 16 };

/* A walk over rows' pages of 16 keys. */
typedef struct {
    const Attention *a;
    const int32_t *tables;
    const Decode *rows;
    int64_t last; /* row */
} Walk;

typedef struct {
    alignas(64) uint32_t queries[MAX_QUERY_TILES][256]; /* B tiles [KV heads][dim / 32] */
    alignas(64) float scores[PAGES * 16][16];
    alignas(64) uint32_t weights[PAGES * 8][16]; /* pairs of keys, by head */
    alignas(64) float sums[MAX_LANES][MAX_DIM];
    const bf16 *keys[PAGES], *values[PAGES]; /* of the pack's first head */
    const bf16 *next_keys[PAGES], *next_values[PAGES];
    int64_t page_stride; /* elements between tokens of a page */
    int64_t first_kv_head, kv_heads, group, lanes;
    vf maximum, sum;
} Pack;

static inline vf to_split(vf low, vf high, bool second)
{
    static const alignas(64) int32_t order[2][16] = {{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
                                                     {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31}};
    return _mm512_permutex2var_ps(low, _mm512_load_si512(order[second]), high);
}

static inline vf from_split(vf first, vf second, bool high)
{
    static const alignas(64) int32_t order[2][16] = {{0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23},
                                                     {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31}};
    return _mm512_permutex2var_ps(first, _mm512_load_si512(order[high]), second);
}

static void load_pack_queries(Pack *p, const bf16 *query, int64_t dim)
{
    for (int64_t step = 0; step < dim / 32; step++) {
        __m512i r[16];
        for (int i = 0; i < 16; i++)
            r[i] = i < p->lanes ? _mm512_loadu_si512(query + i * dim + step * 32) : _mm512_setzero_si512();
        transpose(r);
        for (int64_t h = 0; h < p->kv_heads; h++) {
            __mmask16 own = ((1u << p->group) - 1) << (h * p->group);
            for (int i = 0; i < 16; i++)
                _mm512_store_si512(&p->queries[h * (dim / 32) + step][i * 16], _mm512_maskz_mov_epi32(own, r[i]));
        }
    }
}

/* Empty, or what the row's group left. */
static void open_pack(Pack *p, const float *state, int64_t dim)
{
    alignas(64) float maximum[16], sum[16] = {0};
    memset(p->sums, 0, sizeof p->sums);
    for (int i = 0; i < 16; i++)
        maximum[i] = -1e30f;
    for (int64_t i = 0; state && i < p->lanes; i++, state += dim + STATE_EXTRA) {
        for (int64_t d = 0; d < dim; d += 32) {
            vf low = _mm512_loadu_ps(state + d), high = _mm512_loadu_ps(state + d + 16);
            _mm512_store_ps(p->sums[i] + d, to_split(low, high, false));
            _mm512_store_ps(p->sums[i] + d + 16, to_split(low, high, true));
        }
        maximum[i] = state[dim + STATE_MAXIMUM];
        sum[i] = state[dim + STATE_SUM];
    }
    p->maximum = _mm512_load_ps(maximum);
    p->sum = _mm512_load_ps(sum);
}

/* Where the page of 16 keys `page` pages after row `row`'s first own one begins; the rows' pages follow each other. */
static inline int64_t page_ahead(const Walk *w, int64_t row, int64_t page)
{
    for (;;) {
        const Decode *r = &w->rows[row];
        int64_t key = r->shared + page * 16;
        if (key < r->context)
            return pool_offset(w->a, w->tables + r->table, key);
        if (++row >= w->last)
            return pool_offset(w->a, w->tables + r->table, r->context - 1);
        page -= (r->context - r->shared + 15) / 16;
    }
}

/* Finds the next pages of a row, or copies their keys where pages are not whole tiles. */
static void find_pages(Pack *p, const Walk *w, int64_t row, int64_t page, int64_t pages, bf16 *copy)
{
    const Attention *a = w->a;
    const Decode *r = &w->rows[row];
    const bf16 *keys = (const bf16 *)a->keys + p->first_kv_head * a->head_dim;
    const bf16 *values = (const bf16 *)a->values + p->first_kv_head * a->head_dim;
    if (a->block_size % 16 == 0) {
        p->page_stride = a->token_stride;
        for (int64_t i = 0; i < pages; i++) {
            int64_t here = pool_offset(a, w->tables + r->table, r->shared + (page + i) * 16);
            int64_t ahead = page_ahead(w, row, page + i + AHEAD);
            p->keys[i] = keys + here;
            p->values[i] = values + here;
            p->next_keys[i] = keys + ahead;
            p->next_values[i] = values + ahead;
        }
        return;
    }
    const int64_t width = p->kv_heads * a->head_dim, first = r->shared + page * 16;
    p->page_stride = width;
    for (int64_t i = 0; i < pages * 16 && first + i < r->context; i++) {
        int64_t here = pool_offset(a, w->tables + r->table, first + i);
        memcpy(copy + i * width, keys + here, width * sizeof(bf16));
        memcpy(copy + (PAGES * 16 + i) * width, values + here, width * sizeof(bf16));
    }
    for (int64_t i = 0; i < pages; i++) {
        p->keys[i] = p->next_keys[i] = copy + i * 16 * width;
        p->values[i] = p->next_values[i] = copy + (PAGES + i) * 16 * width;
    }
}

static inline void score_pages(Pack *p, int64_t pages, int64_t dim)
{
    const int64_t stride = p->page_stride * 2;
    FENCE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t h = 0; h < p->kv_heads; h++)
        for (int64_t step = 0; step < dim / 32; step++) {
            const int64_t column = h * dim + step * 32;
            _tile_loadd(6, p->queries[h * (dim / 32) + step], 64);
            _tile_loadd(4, p->keys[0] + column, stride);
            _tile_dpbf16ps(0, 4, 6);
            if (pages > 1) {
                _tile_loadd(5, p->keys[1] + column, stride);
                _tile_dpbf16ps(1, 5, 6);
            }
            if (pages > 2) {
                _tile_loadd(4, p->keys[2] + column, stride);
                _tile_dpbf16ps(2, 4, 6);
            }
            if (pages > 3) {
                _tile_loadd(5, p->keys[3] + column, stride);
                _tile_dpbf16ps(3, 5, 6);
            }
        }
    _tile_stored(0, p->scores[0], 64);
    _tile_stored(1, p->scores[16], 64);
    _tile_stored(2, p->scores[32], 64);
    _tile_stored(3, p->scores[48], 64);
    FENCE;
}

/* Scores of `count` keys become weights in pairs; earlier sums shrink where the maximum rises. */
static inline void open_pack_softmax(Pack *p, int64_t count, vf scale, int64_t dim)
{
    const int64_t padded = (count + 15) / 16 * 16;
    for (int64_t t = count; t < padded; t++)
        _mm512_store_ps(p->scores[t], _mm512_set1_ps(-1e30f));
    vf a = _mm512_set1_ps(-1e30f), b = a;
    for (int64_t t = 0; t < padded; t += 2) {
        a = _mm512_max_ps(a, _mm512_load_ps(p->scores[t]));
        b = _mm512_max_ps(b, _mm512_load_ps(p->scores[t + 1]));
    }
    vf maximum = _mm512_max_ps(p->maximum, _mm512_mul_ps(scale, _mm512_max_ps(a, b)));
    if (_mm512_cmp_ps_mask(maximum, p->maximum, _CMP_NLE_UQ)) {
        alignas(64) float shrink[16];
        vf by = exp2_for_bf16(_mm512_sub_ps(p->maximum, maximum));
        _mm512_store_ps(shrink, by);
        p->sum = _mm512_mul_ps(p->sum, by);
        for (int64_t i = 0; i < p->lanes; i++)
            for (int64_t d = 0; d < dim; d += 16)
                _mm512_store_ps(p->sums[i] + d, _mm512_mul_ps(_mm512_set1_ps(shrink[i]), _mm512_load_ps(p->sums[i] + d)));
    }
    p->maximum = maximum;
    for (int64_t t = 0; t < padded; t += 2) {
        vf even = exp2_for_bf16(_mm512_fmsub_ps(_mm512_load_ps(p->scores[t]), scale, maximum));
        vf odd = exp2_for_bf16(_mm512_fmsub_ps(_mm512_load_ps(p->scores[t + 1]), scale, maximum));
        p->sum = _mm512_add_ps(p->sum, _mm512_add_ps(even, odd));
        _mm512_store_si512(p->weights[t / 2], pairs(even, odd));
    }
}

/* sums[heads][32 * vectors values] += weights x values over `count` keys of the step. */
static inline __attribute__((always_inline)) void weigh_block(const int heads, const int vectors, Pack *p, int64_t lane, int64_t column,
                                                              int64_t sum_column, int64_t count, bool fetches)
{
    vf sums[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < heads; i++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * vectors; v++)
            sums[i][v] = _mm512_load_ps(p->sums[lane + i] + sum_column + 16 * v);
    for (int64_t t = 0; t < count; t += 2) {
        const int64_t page = t / 16, offset = t % 16 * p->page_stride + column;
        const bf16 *even = p->values[page] + offset, *odd = even + p->page_stride;
        if (fetches) {
            const bf16 *key = p->next_keys[page] + offset, *value = p->next_values[page] + offset;
            fetch_lines(key, vectors);
            fetch_lines(key + p->page_stride, vectors);
            fetch_lines(value, vectors);
            fetch_lines(value + p->page_stride, vectors);
        }
        __m512bh rows[4];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            __m512i a = _mm512_loadu_si512(even + 32 * v);
            /* Past the context lies anything, NaN included, which a weight of 0 would not silence. */
            __m512i b = t + 1 < count ? _mm512_loadu_si512(odd + 32 * v) : _mm512_setzero_si512();
            rows[2 * v] = (__m512bh)_mm512_unpacklo_epi16(a, b);
            rows[2 * v + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
        }
#pragma GCC unroll 4
        for (int i = 0; i < heads; i++) {
            __m512bh weight = (__m512bh)_mm512_set1_epi32(p->weights[t / 2][lane + i]);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * vectors; v++)
                sums[i][v] = _mm512_dpbf16_ps(sums[i][v], rows[v], weight);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < heads; i++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * vectors; v++)
            _mm512_store_ps(p->sums[lane + i] + sum_column + 16 * v, sums[i][v]);
}

static inline void weigh_heads(int64_t heads, const int vectors, Pack *p, int64_t lane, int64_t column, int64_t sum_column, int64_t count,
                               bool fetches)
{
    switch (heads) {
    case 1: weigh_block(1, vectors, p, lane, column, sum_column, count, fetches); break;
    case 2: weigh_block(2, vectors, p, lane, column, sum_column, count, fetches); break;
    case 3: weigh_block(3, vectors, p, lane, column, sum_column, count, fetches); break;
    default: weigh_block(4, vectors, p, lane, column, sum_column, count, fetches);
    }
}

/* All values of the step: 64 (or the odd 32) dimensions and up to four query heads at a time. */
static inline void weigh_values(Pack *p, int64_t count, int64_t dim)
{
    for (int64_t h = 0; h < p->kv_heads; h++)
        for (int64_t d = 0; d < dim; d += 64)
            for (int64_t g = 0; g < p->group; g += 4) {
                int64_t heads = p->group - g < 4 ? p->group - g : 4;
                if (dim - d >= 64)
                    weigh_heads(heads, 2, p, h * p->group + g, h * dim + d, d, count, g == 0);
                else
                    weigh_heads(heads, 1, p, h * p->group + g, h * dim + d, d, count, g == 0);
            }
}

static void write_pack(const Pack *p, bf16 *output, int64_t dim)
{
    alignas(64) float inverse[16];
    _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1), p->sum));
    for (int64_t i = 0; i < p->lanes; i++)
        for (int64_t d = 0; d < dim; d += 32) {
            vf scale = _mm512_set1_ps(inverse[i]);
            vf first = _mm512_mul_ps(scale, _mm512_load_ps(p->sums[i] + d));
            vf second = _mm512_mul_ps(scale, _mm512_load_ps(p->sums[i] + d + 16));
            vf_store_bf16(output + i * dim + d, from_split(first, second, false));
            vf_store_bf16(output + i * dim + d + 16, from_split(first, second, true));
        }
}

static void attend_pack(Pack *p, const Walk *w, int64_t row, bf16 *copy)
{
    const Attention *a = w->a;
    const Decode *r = &w->rows[row];
    const int64_t dim = a->head_dim, head = p->first_kv_head * p->group;
    const vf scale = _mm512_set1_ps(LOG2E / sqrtf(dim));
    load_pack_queries(p, (const bf16 *)a->queries + r->token * a->query_stride + head * dim, dim);
    open_pack(p, r->shared ? a->state + (row * a->num_heads + head) * (dim + STATE_EXTRA) : NULL, dim);
    for (int64_t page = 0; r->shared + page * 16 < r->context; page += PAGES) {
        int64_t left = r->context - r->shared - page * 16, count = left < PAGES * 16 ? left : PAGES * 16;
        find_pages(p, w, row, page, (count + 15) / 16, copy);
        score_pages(p, (count + 15) / 16, dim);
        open_pack_softmax(p, count, scale, dim);
        weigh_values(p, count, dim);
    }
    write_pack(p, (bf16 *)a->output + (r->token * a->num_heads + head) * dim, dim);
}

static void attend_decodes_amx(const Attention *a, const int32_t *tables, const Decode *rows, int64_t first, int64_t last,
                               int64_t first_kv_head, int64_t last_kv_head, void *scratch)
{
    const int64_t group = a->num_heads / a->num_kv_heads;
    const int64_t by_lanes = MAX_LANES / group, by_tiles = MAX_QUERY_TILES * 32 / a->head_dim;
    const int64_t heads = by_lanes < by_tiles ? by_lanes : by_tiles;
    const Walk walk = {a, tables, rows, last};
    Pack p = {.group = group};
    _tile_loadconfig(&whole_tiles);
    for (int64_t row = first; row < last; row++)
        for (int64_t head = first_kv_head; head < last_kv_head; head += heads) {
            p.first_kv_head = head;
            p.kv_heads = last_kv_head - head < heads ? last_kv_head - head : heads;
            p.lanes = p.kv_heads * group;
            attend_pack(&p, &walk, row, scratch);
        }
    _tile_release();
}
