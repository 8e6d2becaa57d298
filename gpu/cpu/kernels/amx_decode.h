/* attention_decode.h on AMX, bf16: rows of one token, straight from the pages.
 *
 * Idea. KV heads are taken in packs whose query heads fill the 16 columns of a tile. Scores of 16 keys are one accumulator for
 * the whole pack: each KV head's B tiles hold its own queries and zeros elsewhere, so the heads' products add up side by side.
 * The softmax then runs along vectors of 16 heads. Values are weighed by AVX512_BF16 dot products over pairs of keys, since
 * V lies in rows and would have to be rearranged for a tile. Steps of 64 keys, four pages of accumulators at once, all packs
 * before the next step: the walk follows memory.
 * Traffic: K and V of the context once, fetched beside all of the work of the step before; see amx_pages.h.
 *
 * Unpacking pairs of rows splits 32 values into (0-3, 8-11, 16-19, 24-27) and (4-7, 12-15, ...): sums live in that order,
 * and come out of it at the end.
 */

enum { MAX_LANES = 16, MAX_QUERY_TILES = 16 };

/* About how many cycles a tile of keys takes, the softmax of a pair of keys, and weighing a pair for up to four heads. */
enum { SCORE_WORK = 56, SOFTMAX_WORK = 20, WEIGH_WORK = 26 };

/* KV heads computed together, and what they have found so far. */
typedef struct {
    alignas(64) uint32_t queries[MAX_QUERY_TILES][256]; /* B tiles [KV heads][dim / 32] */
    alignas(64) float sums[MAX_LANES][MAX_DIM];
    alignas(64) float maximum[16], sum[16];
    int64_t first_kv_head, kv_heads, lanes; /* the first counted from the walk's */
} Pack;

_Static_assert(sizeof(Pack) <= PACK_BYTES && PAGES * 16 <= COPIED_KEYS, "scratch_bytes must know");

/* One pack's step, by key. */
typedef struct {
    alignas(64) float scores[PAGES * 16][16];
    alignas(64) uint32_t weights[PAGES * 8][16]; /* pairs of keys */
} Weights;

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

static void load_pack_queries(Pack *p, const bf16 *query, int64_t group, int64_t dim)
{
    for (int64_t step = 0; step < dim / 32; step++) {
        __m512i r[16];
        for (int i = 0; i < 16; i++)
            r[i] = i < p->lanes ? _mm512_loadu_si512(query + i * dim + step * 32) : _mm512_setzero_si512();
        transpose(r);
        for (int64_t h = 0; h < p->kv_heads; h++) {
            __mmask16 own = ((1u << group) - 1) << (h * group);
            for (int i = 0; i < 16; i++)
                _mm512_store_si512(&p->queries[h * (dim / 32) + step][i * 16], _mm512_maskz_mov_epi32(own, r[i]));
        }
    }
}

/* Empty, or what the row's group left. */
static void open_pack(Pack *p, const float *state, int64_t dim)
{
    memset(p->sums, 0, sizeof p->sums);
    memset(p->sum, 0, sizeof p->sum);
    for (int i = 0; i < 16; i++)
        p->maximum[i] = -1e30f;
    for (int64_t i = 0; state && i < p->lanes; i++, state += dim + STATE_EXTRA) {
        for (int64_t d = 0; d < dim; d += 32) {
            vf low = _mm512_loadu_ps(state + d), high = _mm512_loadu_ps(state + d + 16);
            _mm512_store_ps(p->sums[i] + d, to_split(low, high, false));
            _mm512_store_ps(p->sums[i] + d + 16, to_split(low, high, true));
        }
        p->maximum[i] = state[dim + STATE_MAXIMUM];
        p->sum[i] = state[dim + STATE_SUM];
    }
}

static inline void score_pages(const Pack *p, const Pages *pages, Weights *w, PageFetch *fetch, int64_t count, int64_t dim)
{
    const int64_t stride = pages->stride * 2;
    FENCE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t h = 0; h < p->kv_heads; h++)
        for (int64_t step = 0; step < dim / 32; step++) {
            const int64_t column = (p->first_kv_head + h) * dim + step * 32;
            _tile_loadd(6, p->queries[h * (dim / 32) + step], 64);
            _tile_loadd(4, pages->keys[0] + column, stride);
            _tile_dpbf16ps(0, 4, 6);
            fetch_beside(fetch, SCORE_WORK);
            if (count > 1) {
                _tile_loadd(5, pages->keys[1] + column, stride);
                _tile_dpbf16ps(1, 5, 6);
                fetch_beside(fetch, SCORE_WORK);
            }
            if (count > 2) {
                _tile_loadd(4, pages->keys[2] + column, stride);
                _tile_dpbf16ps(2, 4, 6);
                fetch_beside(fetch, SCORE_WORK);
            }
            if (count > 3) {
                _tile_loadd(5, pages->keys[3] + column, stride);
                _tile_dpbf16ps(3, 5, 6);
                fetch_beside(fetch, SCORE_WORK);
            }
        }
    _tile_stored(0, w->scores[0], 64);
    _tile_stored(1, w->scores[16], 64);
    _tile_stored(2, w->scores[32], 64);
    _tile_stored(3, w->scores[48], 64);
    FENCE;
}

/* Scores of `count` keys become weights in pairs; earlier sums shrink where the maximum rises. */
static inline void open_pack_softmax(Pack *p, Weights *w, PageFetch *fetch, int64_t count, vf scale, int64_t dim)
{
    const int64_t padded = (count + 15) / 16 * 16;
    vf before = _mm512_load_ps(p->maximum), sum = _mm512_load_ps(p->sum), a = _mm512_set1_ps(-1e30f), b = a;
    for (int64_t t = count; t < padded; t++)
        _mm512_store_ps(w->scores[t], a);
    for (int64_t t = 0; t < padded; t += 2) {
        a = _mm512_max_ps(a, _mm512_load_ps(w->scores[t]));
        b = _mm512_max_ps(b, _mm512_load_ps(w->scores[t + 1]));
    }
    vf maximum = _mm512_max_ps(before, _mm512_mul_ps(scale, _mm512_max_ps(a, b)));
    if (_mm512_cmp_ps_mask(maximum, before, _CMP_NLE_UQ)) {
        alignas(64) float shrink[16];
        vf by = exp2_for_bf16(_mm512_sub_ps(before, maximum));
        _mm512_store_ps(shrink, by);
        sum = _mm512_mul_ps(sum, by);
        for (int64_t i = 0; i < p->lanes; i++)
            for (int64_t d = 0; d < dim; d += 16)
                _mm512_store_ps(p->sums[i] + d, _mm512_mul_ps(_mm512_set1_ps(shrink[i]), _mm512_load_ps(p->sums[i] + d)));
    }
    for (int64_t t = 0; t < padded; t += 2) {
        fetch_beside(fetch, SOFTMAX_WORK);
        vf even = exp2_for_bf16(_mm512_fmsub_ps(_mm512_load_ps(w->scores[t]), scale, maximum));
        vf odd = exp2_for_bf16(_mm512_fmsub_ps(_mm512_load_ps(w->scores[t + 1]), scale, maximum));
        sum = _mm512_add_ps(sum, _mm512_add_ps(even, odd));
        _mm512_store_si512(w->weights[t / 2], pairs(even, odd));
    }
    _mm512_store_ps(p->maximum, maximum);
    _mm512_store_ps(p->sum, sum);
}

/* What weigh_block works on: `heads` query heads of one KV head, from `lane` on, and 32 * vectors of its dimensions. */
typedef struct {
    Pack *pack;
    const Pages *pages;
    const Weights *weights;
    PageFetch *fetch;
    int64_t lane, column, dimension; /* column: of the walk's heads' dimensions */
    int64_t count; /* keys */
} Block;

/* sums[heads][32 * vectors] += weights x values */
INLINE void weigh_block(const int heads, const int vectors, const Block *b)
{
    const int64_t stride = b->pages->stride;
    vf sums[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < heads; i++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * vectors; v++)
            sums[i][v] = _mm512_load_ps(b->pack->sums[b->lane + i] + b->dimension + 16 * v);
    for (int64_t t = 0; t < b->count; t += 2) {
        const bf16 *even = b->pages->values[t / 16] + t % 16 * stride + b->column, *odd = even + stride;
        fetch_beside(b->fetch, WEIGH_WORK);
        __m512bh rows[4];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            __m512i x = _mm512_loadu_si512(even + 32 * v);
            /* Past the context lies anything, NaN included, which a weight of 0 would not silence. */
            __m512i y = t + 1 < b->count ? _mm512_loadu_si512(odd + 32 * v) : _mm512_setzero_si512();
            rows[2 * v] = (__m512bh)_mm512_unpacklo_epi16(x, y);
            rows[2 * v + 1] = (__m512bh)_mm512_unpackhi_epi16(x, y);
        }
#pragma GCC unroll 4
        for (int i = 0; i < heads; i++) {
            __m512bh weight = (__m512bh)_mm512_set1_epi32(b->weights->weights[t / 2][b->lane + i]);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * vectors; v++)
                sums[i][v] = _mm512_dpbf16_ps(sums[i][v], rows[v], weight);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < heads; i++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * vectors; v++)
            _mm512_store_ps(b->pack->sums[b->lane + i] + b->dimension + 16 * v, sums[i][v]);
}

INLINE void weigh_heads(int64_t heads, const int vectors, const Block *b)
{
    switch (heads) {
    case 1: weigh_block(1, vectors, b); break;
    case 2: weigh_block(2, vectors, b); break;
    case 3: weigh_block(3, vectors, b); break;
    default: weigh_block(4, vectors, b);
    }
}

/* All values of a pack's step: 64 (or the odd 32) dimensions and up to four query heads at a time. */
static void weigh_values(Pack *p, const Pages *pages, const Weights *weights, const Walk *w, PageFetch *fetch, int64_t count)
{
    const int64_t dim = w->a->head_dim;
    for (int64_t h = 0; h < p->kv_heads; h++)
        for (int64_t d = 0; d < dim; d += 64)
            for (int64_t g = 0; g < w->group; g += 4) {
                const int64_t heads = w->group - g < 4 ? w->group - g : 4, column = (p->first_kv_head + h) * dim + d;
                const Block block = {p, pages, weights, fetch, h * w->group + g, column, d, count};
                if (dim - d >= 64)
                    weigh_heads(heads, 2, &block);
                else
                    weigh_heads(heads, 1, &block);
            }
}

static void write_pack(const Pack *p, bf16 *output, int64_t dim)
{
    for (int64_t i = 0; i < p->lanes; i++)
        for (int64_t d = 0; d < dim; d += 32) {
            vf scale = _mm512_set1_ps(1 / p->sum[i]);
            vf first = _mm512_mul_ps(scale, _mm512_load_ps(p->sums[i] + d));
            vf second = _mm512_mul_ps(scale, _mm512_load_ps(p->sums[i] + d + 16));
            vf_store_bf16(output + i * dim + d, from_split(first, second, false));
            vf_store_bf16(output + i * dim + d + 16, from_split(first, second, true));
        }
}

/* Divides the walk's heads into packs. Returns their number. */
static int64_t open_packs(Pack *packs, const Walk *w, int64_t row)
{
    const Attention *a = w->a;
    const Decode *r = &w->rows[row];
    const int64_t dim = a->head_dim, by_lanes = MAX_LANES / w->group, by_tiles = MAX_QUERY_TILES * 32 / dim;
    const int64_t most = by_lanes < by_tiles ? by_lanes : by_tiles;
    int64_t count = 0;
    for (int64_t kv_head = w->first_kv_head; kv_head < w->last_kv_head; kv_head += most, count++) {
        Pack *p = &packs[count];
        p->first_kv_head = kv_head - w->first_kv_head;
        p->kv_heads = w->last_kv_head - kv_head < most ? w->last_kv_head - kv_head : most;
        p->lanes = p->kv_heads * w->group;
        load_pack_queries(p, (const bf16 *)a->queries + r->token * a->query_stride + kv_head * w->group * dim, w->group, dim);
        open_pack(p, r->shared ? a->state + (row * a->num_heads + kv_head * w->group) * (dim + STATE_EXTRA) : NULL, dim);
    }
    return count;
}

/* Of a step of `keys` keys. */
static int64_t step_work(const Walk *w, int64_t packs, int64_t keys)
{
    const int64_t heads = w->last_kv_head - w->first_kv_head, dim = w->a->head_dim;
    const int64_t tiles = heads * (dim / 32) * ((keys + 15) / 16), pairs = (keys + 1) / 2;
    return tiles * SCORE_WORK + pairs * (packs * SOFTMAX_WORK + heads * ((dim + 63) / 64) * ((w->group + 3) / 4) * WEIGH_WORK);
}

static void attend_row_amx(const Walk *w, int64_t row, Pack *packs, bf16 *copy)
{
    const Decode *r = &w->rows[row];
    const int64_t dim = w->a->head_dim, count = open_packs(packs, w, row);
    const vf scale = _mm512_set1_ps(LOG2E / sqrtf(dim));
    Pages pages;
    Weights weights;
    PageFetch fetch;
    for (int64_t page = 0; r->shared + page * 16 < r->context; page += PAGES) {
        const int64_t left = r->context - r->shared - page * 16, keys = left < PAGES * 16 ? left : PAGES * 16;
        find_pages(&pages, w, row, page, (keys + 15) / 16, copy);
        start_fetch(&fetch, w, row, page + PAGES, step_work(w, count, keys));
        for (int64_t i = 0; i < count; i++) {
            score_pages(&packs[i], &pages, &weights, &fetch, (keys + 15) / 16, dim);
            open_pack_softmax(&packs[i], &weights, &fetch, keys, scale, dim);
            weigh_values(&packs[i], &pages, &weights, w, &fetch, keys);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        const int64_t head = (w->first_kv_head + packs[i].first_kv_head) * w->group;
        write_pack(&packs[i], (bf16 *)w->a->output + (r->token * w->a->num_heads + head) * dim, dim);
    }
}

static void attend_decodes_amx(const Attention *a, const int32_t *tables, const Decode *rows, int64_t first, int64_t last,
                               int64_t first_kv_head, int64_t last_kv_head, void *scratch)
{
    const int64_t width = (last_kv_head - first_kv_head) * a->head_dim;
    Walk w = {a, tables, rows, last, first_kv_head, last_kv_head, a->num_heads / a->num_kv_heads, width / 2, width / 32};
    if (a->token_stride == width)
        w.lines_together = w.lines; /* of all tokens */
    Pack *packs = scratch;
    _tile_loadconfig(&whole_tiles);
    for (int64_t row = first; row < last; row++)
        attend_row_amx(&w, row, packs, (bf16 *)(packs + last_kv_head - first_kv_head));
    _tile_release();
}
