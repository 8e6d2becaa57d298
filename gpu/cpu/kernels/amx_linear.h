/* Linear layers on AMX, bf16.
 *
 * Idea. Weights are packed once as B tiles, [n / 32][k / 32][2] of 1 KiB, so that a layer is one sequential stream: what few
 * rows need, since they are bound by reading it. Many rows use 32 x 32 blocks, four accumulators for four loads, which is
 * bound by moving tiles from L2: what the next block uses again is to stay in L1, and the rest is loaded past it (a "stream"
 * load leaves L1 as it is). One block keeps its rows there, several keep the weights, DEPTH steps at a time, with the sums
 * set aside in between.
 * Each output is summed over k in one order whatever the batch. Traffic: weights once per group of rows that stays in L2,
 * x from L2 once per 32 columns, y once, in the epilogue: convert, add to the residual, or SiLU(gate) * up (their tiles are
 * interleaved). The next 32 columns' weights are fetched during the arithmetic, spread over it: in a burst the memory
 * would idle meanwhile. For more than 16 rows the epilogue of a block runs between the tile products of the next.
 */

enum {
    TILE = 512, /* elements */
    PANEL = 32, /* columns */
    DEPTH = 18 /* steps of 32 whose weights, 2 KiB each, leave L1 room for what passes through */
};

typedef float Sums[32][PANEL];

static void pack_amx(const void *weights, void *packed, int64_t n, int64_t k, bool interleave)
{
    const int64_t steps = k / 32;
    for (int64_t tile = 0; tile < (n + PANEL - 1) / PANEL * 2; tile++) {
        int64_t first = interleave ? tile % 2 * (n / 2) + tile / 2 * 16 : tile * 16;
        for (int64_t step = 0; step < steps; step++) {
            __m512i r[16];
            for (int i = 0; i < 16; i++)
                r[i] = first + i < n ? _mm512_loadu_si512((const bf16 *)weights + (first + i) * k + step * 32)
                                     : _mm512_setzero_si512();
            transpose(r);
            bf16 *to = (bf16 *)packed + ((tile / 2 * steps + step) * 2 + tile % 2) * TILE;
            for (int i = 0; i < 16; i++)
                _mm512_storeu_si512(to + i * 32, r[i]);
        }
    }
}

static inline vf silu_times(vf gate, vf up)
{
    /* 14 bits of the reciprocal: the result has 8. */
    vf e = vf_exp2(_mm512_mul_ps(gate, _mm512_set1_ps(-LOG2E)));
    return _mm512_mul_ps(_mm512_mul_ps(gate, up), _mm512_rcp14_ps(_mm512_add_ps(_mm512_set1_ps(1), e)));
}

/* One row of a 32 x 32 block to its place. */
INLINE void finish(const int epilogue, const float *sums, void *y)
{
    vf left = _mm512_load_ps(sums), right = _mm512_load_ps(sums + 16);
    if (epilogue == LOGITS) {
        _mm512_storeu_ps(y, left);
        _mm512_storeu_ps((float *)y + 16, right);
    } else if (epilogue == SILU_MUL) {
        vf_store_bf16(y, silu_times(left, right));
    } else {
        if (epilogue == ADD) {
            left = _mm512_add_ps(left, vf_load_bf16(y));
            right = _mm512_add_ps(right, vf_load_bf16((bf16 *)y + 16));
        }
        _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(right, left));
    }
}

/* Where row `row` of a panel goes. */
INLINE char *destination(const int epilogue, const Linear *l, int64_t row, int64_t panel)
{
    const int64_t size = epilogue == LOGITS ? sizeof(float) : sizeof(bf16), columns = epilogue == SILU_MUL ? 16 : PANEL;
    return (char *)l->y + (row * l->y_stride + panel * columns) * size;
}

/* At most 16 rows: two accumulators, bound by the stream of weights. */
INLINE void few_rows(const int epilogue, const Linear *l, int64_t first_panel, int64_t last_panel)
{
    const int64_t steps = l->k / 32;
    alignas(64) float sums[16][PANEL];
    for (int64_t panel = first_panel; panel < last_panel; panel++) {
        const bf16 *x = l->x, *w = (const bf16 *)l->weights + panel * steps * 2 * TILE;
        const bf16 *next = w + steps * 2 * TILE;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t step = 0; step < steps; step++) {
            _tile_stream_loadd(6, w + step * 2 * TILE, 64);
            _tile_loadd(4, x + step * 32, l->x_stride * 2);
            _tile_stream_loadd(7, w + step * 2 * TILE + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            fetch_lines(next + step * 2 * TILE, 32);
        }
        _tile_stored(0, sums[0], PANEL * 4);
        _tile_stored(1, sums[0] + 16, PANEL * 4);
        FENCE;
        for (int64_t row = 0; row < l->m; row++)
            finish(epilogue, sums[row], destination(epilogue, l, row, panel));
        FENCE;
    }
}

/* A finished block whose rows still have to be written. */
typedef struct {
    float (*sums)[PANEL];
    char *y;
    int64_t row, rows;
} Unwritten;

INLINE void write_rows(const int epilogue, Unwritten *block, int64_t y_bytes, int64_t count)
{
    for (; count > 0 && block->row < block->rows; count--, block->row++)
        finish(epilogue, block->sums[block->row], block->y + block->row * y_bytes);
}

/* Weights on their way to the cache, `lines` of them a step. */
typedef struct {
    const bf16 *from;
    int64_t lines;
} Fetch;

/* The lines of a quarter of a step. */
INLINE void fetch_quarter(Fetch *f, int quarter)
{
    const int64_t count = (f->lines + 3 - quarter) / 4;
    fetch_lines(f->from, count);
    f->from += count * 32;
}

#define LOAD_TILE(past_l1, tile, from, stride) \
    do { \
        if (past_l1) \
            _tile_stream_loadd(tile, from, stride); \
        else \
            _tile_loadd(tile, from, stride); \
    } while (0)

/* The accumulators += 32 x 32 products over `steps`, while the block before is written two rows a step. */
INLINE void multiply_32x32(const int epilogue, const bool keeps_rows, const bf16 *x, int64_t x_stride, const bf16 *w,
                           int64_t steps, Unwritten *before, int64_t y_bytes, Fetch *fetch)
{
    for (int64_t step = 0; step < steps; step++, x += 32, w += 2 * TILE) {
        LOAD_TILE(keeps_rows, 6, w, 64);
        fetch_quarter(fetch, 0);
        LOAD_TILE(!keeps_rows, 4, x, x_stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        fetch_quarter(fetch, 1);
        LOAD_TILE(keeps_rows, 7, w + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        fetch_quarter(fetch, 2);
        LOAD_TILE(!keeps_rows, 5, x + 16 * x_stride, x_stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        fetch_quarter(fetch, 3);
        _tile_dpbf16ps(3, 5, 7);
        if (step)
            write_rows(epilogue, before, y_bytes, 2);
    }
    write_rows(epilogue, before, y_bytes, 32);
}

INLINE void load_sums(Sums from)
{
    _tile_loadd(0, from[0], PANEL * 4);
    _tile_loadd(1, from[0] + 16, PANEL * 4);
    _tile_loadd(2, from[16], PANEL * 4);
    _tile_loadd(3, from[16] + 16, PANEL * 4);
}

INLINE void zero_sums(void)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void store_sums(Sums to)
{
    _tile_stored(2, to[16], PANEL * 4);
    _tile_stored(3, to[16] + 16, PANEL * 4);
    _tile_stored(0, to[0], PANEL * 4);
    _tile_stored(1, to[0] + 16, PANEL * 4);
    FENCE;
}

/* `aside`: room for the sums of all blocks. */
INLINE void many_rows(const int epilogue, const bool keeps_rows, const Linear *l, int64_t first_panel, int64_t last_panel,
                      Sums *aside)
{
    const int64_t steps = l->k / 32, blocks = (l->m + 31) / 32, parts = keeps_rows ? 1 : (steps + DEPTH - 1) / DEPTH;
    const int64_t y_bytes = l->y_stride * (epilogue == LOGITS ? 4 : 2);
    alignas(64) Sums done[2];
    Unwritten before = {done[1], NULL, 0, 0};
    for (int64_t panel = first_panel; panel < last_panel; panel++) {
        const bf16 *w = (const bf16 *)l->weights + panel * steps * 2 * TILE;
        Fetch fetch = {w + steps * 2 * TILE, (32 + blocks - 1) / blocks}; /* a panel's blocks fetch the next panel */
        for (int64_t part = 0; part < parts; part++) {
            const int64_t first = steps * part / parts, count = steps * (part + 1) / parts - first;
            for (int64_t block = 0; block < blocks; block++) {
                const bf16 *x = (const bf16 *)l->x + block * 32 * l->x_stride + first * 32;
                if (part)
                    load_sums(aside[block]);
                else
                    zero_sums();
                multiply_32x32(epilogue, keeps_rows, x, l->x_stride, w + first * 2 * TILE, count, &before, y_bytes, &fetch);
                if (part < parts - 1) {
                    store_sums(aside[block]);
                    continue;
                }
                const int64_t rows = l->m - block * 32;
                before.sums = before.sums == done[0] ? done[1] : done[0];
                store_sums(before.sums);
                before = (Unwritten){before.sums, destination(epilogue, l, block * 32, panel), 0, rows < 32 ? rows : 32};
            }
        }
    }
    write_rows(epilogue, &before, y_bytes, 32);
}

INLINE void linear_with(const int epilogue, const Linear *linear, int64_t first_panel, int64_t last_panel, Sums *aside)
{
    const int64_t group = linear->k > 1000 ? 256 : 512; /* rows that stay in L2 */
    for (int64_t row = 0; row < linear->m; row += group) {
        Linear part = *linear;
        part.x = (const bf16 *)linear->x + row * linear->x_stride;
        part.y = destination(epilogue, linear, row, 0);
        part.m = linear->m - row < group ? linear->m - row : group;
        if (part.m <= 16)
            few_rows(epilogue, &part, first_panel, last_panel);
        else if (part.m <= 32)
            many_rows(epilogue, true, &part, first_panel, last_panel, aside);
        else
            many_rows(epilogue, false, &part, first_panel, last_panel, aside);
    }
}

static void linear_amx(const Linear *linear, int64_t first_panel, int64_t last_panel, void *scratch)
{
    _tile_loadconfig(&whole_tiles);
    switch (linear->epilogue) {
    case PLAIN: linear_with(PLAIN, linear, first_panel, last_panel, scratch); break;
    case ADD: linear_with(ADD, linear, first_panel, last_panel, scratch); break;
    case SILU_MUL: linear_with(SILU_MUL, linear, first_panel, last_panel, scratch); break;
    default: linear_with(LOGITS, linear, first_panel, last_panel, scratch);
    }
    _tile_release();
}
