/* Linear layers for vectors of floats. A template; see elementwise.h.
 *
 * Idea. Weights are packed once into panels of 2 vectors of columns, [n / panel][k][panel], so that a layer is one sequential
 * stream, read from memory once however many rows there are (up to what of x fits in L2). A block of BLOCK_ROWS rows x 1
 * panel accumulates in registers over all of k, so each output is summed in one order whatever the batch: results do not
 * depend on neighbours. x is packed per block as [k][rows] floats, which makes its loads broadcasts of consecutive floats.
 * Traffic per call: weights once, x once from memory and n / panel times from L2, y once. While the first block of a panel
 * is computed the next panel is fetched to L2, spread over the arithmetic.
 */

/* sums[r][:] += x[k * x_step + r] * panel[k][:] over k. `rows` is a constant where this is inlined. */
INLINE void FN(multiply_block)(const int rows, vf (*sums)[2], const float *x, int64_t x_step, const element *panel,
                               int64_t depth, bool fetches_next)
{
    const int64_t ahead = depth * 2 * LANES;
    for (int64_t k = 0; k < depth; k++) {
        const element *w = panel + k * 2 * LANES;
        if (fetches_next)
            for (size_t line = 0; line < 2 * LANES * sizeof(element); line += 64)
                __builtin_prefetch((const char *)(w + ahead) + line, 0, 2);
        vf left = LOAD(w), right = LOAD(w + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vf value = vf_set1(x[k * x_step + r]);
            sums[r][0] = vf_fma(value, left, sums[r][0]);
            sums[r][1] = vf_fma(value, right, sums[r][1]);
        }
    }
}

static inline vf FN(silu_times)(vf gate, vf up)
{
    vf e = vf_exp2(vf_mul(gate, vf_set1(-LOG2E)));
    return vf_mul(vf_div(gate, vf_add(vf_set1(1), e)), up);
}

static inline void FN(finish)(const Linear *linear, int64_t row, int64_t panel, const vf sums[2])
{
    if (linear->epilogue == LOGITS) {
        float *y = (float *)linear->y + row * linear->y_stride + panel * 2 * LANES;
        vf_store_f32(y, sums[0]);
        vf_store_f32(y + LANES, sums[1]);
        return;
    }
    element *y = (element *)linear->y + row * linear->y_stride;
    if (linear->epilogue == SILU_MUL) {
        STORE(y + panel * LANES, FN(silu_times)(sums[0], sums[1]));
        return;
    }
    y += panel * 2 * LANES;
    vf left = sums[0], right = sums[1];
    if (linear->epilogue == ADD) {
        left = vf_add(LOAD(y), left);
        right = vf_add(LOAD(y + LANES), right);
    }
    STORE(y, left);
    STORE(y + LANES, right);
}

INLINE void FN(block)(const int rows, const Linear *linear, const float *x, int64_t row, int64_t panel, bool fetches_next)
{
    const element *weights = (const element *)linear->weights + panel * linear->k * 2 * LANES;
    vf sums[BLOCK_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        sums[r][0] = sums[r][1] = vf_set1(0);
    FN(multiply_block)(rows, sums, x, rows, weights, linear->k, fetches_next);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        FN(finish)(linear, row + r, panel, sums[r]);
}

/* x[rows][k] to floats [k][rows]. */
static void FN(pack_rows)(const Linear *linear, int64_t row, int64_t rows, float *packed)
{
    const element *x = (const element *)linear->x + row * linear->x_stride;
    for (int64_t k = 0; k < linear->k; k++)
        for (int64_t r = 0; r < rows; r++)
            packed[k * rows + r] = TO_FLOAT(x[r * linear->x_stride + k]);
}

static void FN(linear_rows)(const Linear *linear, int64_t first_row, int64_t last_row, int64_t first_panel, int64_t last_panel,
                            float *packed)
{
    for (int64_t row = first_row; row < last_row; row += block_rows(last_row - row))
        FN(pack_rows)(linear, row, block_rows(last_row - row), packed + (row - first_row) * linear->k);
    for (int64_t panel = first_panel; panel < last_panel; panel++)
        for (int64_t row = first_row; row < last_row; row += block_rows(last_row - row)) {
            const float *x = packed + (row - first_row) * linear->k;
            bool is_first = row == first_row;
            switch (block_rows(last_row - row)) {
            case BLOCK_ROWS: FN(block)(BLOCK_ROWS, linear, x, row, panel, is_first); break;
#if LANES == 16
            case 8: FN(block)(8, linear, x, row, panel, is_first); break;
#endif
#if LANES > 4
            case 4: FN(block)(4, linear, x, row, panel, is_first); break;
#endif
            case 2: FN(block)(2, linear, x, row, panel, is_first); break;
            default: FN(block)(1, linear, x, row, panel, is_first);
            }
        }
}

/* Columns of the panels [first_panel, last_panel). Rows go in groups whose packed form stays in L2. */
static void FN(linear)(const Linear *linear, int64_t first_panel, int64_t last_panel, void *scratch)
{
    const int64_t group = rows_in_cache(linear->k);
    for (int64_t row = 0; row < linear->m; row += group)
        FN(linear_rows)(linear, row, row + group < linear->m ? row + group : linear->m, first_panel, last_panel, scratch);
}

/* weights [n, k] to panels. Interleaved: the first half of the rows (gate) and the second (up) alternate by vectors. */
static void FN(pack)(const void *weights, void *packed, int64_t n, int64_t k, bool interleave)
{
    enum { DEPTH = 64 }; /* at a time, so that the piece of the panel being written stays in L1 */
    const int64_t columns = (n + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
    for (int64_t panel = 0; panel < columns; panel += 2 * LANES)
        for (int64_t first = 0; first < k; first += DEPTH)
            for (int64_t column = panel; column < panel + 2 * LANES; column++) {
                int64_t vector = column / LANES;
                int64_t row = interleave ? vector % 2 * (n / 2) + vector / 2 * LANES + column % LANES : column;
                const element *from = (const element *)weights + row * k;
                element *to = (element *)packed + panel * k + column % (2 * LANES);
                for (int64_t i = first; i < k && i < first + DEPTH; i++)
                    to[i * 2 * LANES] = row < n ? from[i] : 0;
            }
}
