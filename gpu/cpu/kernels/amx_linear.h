/* Linear layers on AMX, bf16.
 *
 * Idea. Weights are packed once as B tiles, [n / 32][k / 32][2] of 1 KiB, so that a layer is one sequential stream: what few
 * rows need, since they are bound by reading it. Many rows use 32 x 32 blocks, four accumulators for four loads.
 * Each output is summed over k in one order whatever the batch. Traffic: weights once per group of rows that stays in L2,
 * x from L2 once per 32 columns, y once, in the epilogue: convert, add to the residual, or SiLU(gate) * up (their tiles are
 * interleaved). The next 32 columns' weights are fetched during the arithmetic, spread over it: in a burst the memory
 * would idle meanwhile. For more than 16 rows the epilogue of a block runs between the tile products of the next.
 */

enum { TILE = 512, PANEL = 32 }; /* elements in a tile, columns in a panel */

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
            _tile_loadd(6, w + step * 2 * TILE, 64);
            _tile_loadd(4, x + step * 32, l->x_stride * 2);
            _tile_loadd(7, w + step * 2 * TILE + TILE, 64);
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

/* 32 x 32 products over the whole depth, while the block before is written two rows a step. */
INLINE void multiply_32x32(const int epilogue, const bf16 *x, int64_t x_stride, const bf16 *w, int64_t steps,
                           Unwritten *before, int64_t y_bytes, const bf16 *fetched, int64_t lines)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++) {
        _tile_loadd(6, w + step * 2 * TILE, 64);
        _tile_loadd(4, x + step * 32, x_stride * 2);
        _tile_loadd(7, w + step * 2 * TILE + TILE, 64);
        _tile_loadd(5, x + step * 32 + 16 * x_stride, x_stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        fetch_lines(fetched + step * lines * 32, lines);
        if (step)
            write_rows(epilogue, before, y_bytes, 2);
    }
    write_rows(epilogue, before, y_bytes, 32);
}

INLINE void many_rows(const int epilogue, const Linear *l, int64_t first_panel, int64_t last_panel)
{
    const int64_t steps = l->k / 32, blocks = (l->m + 31) / 32;
    const int64_t lines = blocks < 32 ? 32 / blocks : 1; /* to fetch a step, so that a panel's blocks fetch the next panel */
    const int64_t y_bytes = l->y_stride * (epilogue == LOGITS ? 4 : 2);
    alignas(64) float sums[2][32][PANEL];
    Unwritten before = {sums[1], NULL, 0, 0};
    for (int64_t panel = first_panel; panel < last_panel; panel++) {
        const bf16 *w = (const bf16 *)l->weights + panel * steps * 2 * TILE, *next = w + steps * 2 * TILE;
        for (int64_t block = 0; block < blocks; block++) {
            const bf16 *x = (const bf16 *)l->x + block * 32 * l->x_stride, *fetched = next + block * steps * lines * 32;
            multiply_32x32(epilogue, x, l->x_stride, w, steps, &before, y_bytes, fetched, block * lines < 32 ? lines : 0);
            float(*done)[PANEL] = before.sums == sums[0] ? sums[1] : sums[0];
            _tile_stored(2, done[16], PANEL * 4);
            _tile_stored(3, done[16] + 16, PANEL * 4);
            _tile_stored(0, done[0], PANEL * 4);
            _tile_stored(1, done[0] + 16, PANEL * 4);
            FENCE;
            int64_t rows = l->m - block * 32;
            before = (Unwritten){done, destination(epilogue, l, block * 32, panel), 0, rows < 32 ? rows : 32};
        }
    }
    write_rows(epilogue, &before, y_bytes, 32);
}

INLINE void linear_with(const int epilogue, const Linear *linear, int64_t first_panel, int64_t last_panel)
{
    const int64_t group = linear->k > 1000 ? 256 : 512; /* rows that stay in L2 */
    for (int64_t row = 0; row < linear->m; row += group) {
        Linear part = *linear;
        part.x = (const bf16 *)linear->x + row * linear->x_stride;
        part.y = destination(epilogue, linear, row, 0);
        part.m = linear->m - row < group ? linear->m - row : group;
        if (part.m <= 16)
            few_rows(epilogue, &part, first_panel, last_panel);
        else
            many_rows(epilogue, &part, first_panel, last_panel);
    }
}

static void linear_amx(const Linear *linear, int64_t first_panel, int64_t last_panel, void *scratch)
{
    (void)scratch;
    _tile_loadconfig(&whole_tiles);
    switch (linear->epilogue) {
    case PLAIN: linear_with(PLAIN, linear, first_panel, last_panel); break;
    case ADD: linear_with(ADD, linear, first_panel, last_panel); break;
    case SILU_MUL: linear_with(SILU_MUL, linear, first_panel, last_panel); break;
    default: linear_with(LOGITS, linear, first_panel, last_panel);
    }
    _tile_release();
}
