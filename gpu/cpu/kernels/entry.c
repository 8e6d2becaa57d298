/* What Python calls besides run_step: the build's identity, packing, sizes, and each kernel alone, for its tests. */
#include "repertory.h"

#ifndef SOURCE_HASH
#define SOURCE_HASH ""
#endif

EXPORT int64_t abi_version(void) { return ABI; }

/* A digest of the sources this was built from. */
EXPORT const char *source_hash(void) { return SOURCE_HASH; }

/* Whether there are kernels of this level and element. */
EXPORT int64_t has_kernels(int64_t level, int64_t is_bf16) { return find_kernels(level, is_bf16) != NULL; }

/* Columns to a panel: packed weights and logits have their columns rounded up to whole ones. */
EXPORT int64_t panel_columns(int64_t level, int64_t is_bf16) { return find_kernels(level, is_bf16)->panel; }

EXPORT void pack(int64_t level, int64_t is_bf16, const void *weights, void *packed, int64_t n, int64_t k, int64_t interleave)
{
    find_kernels(level, is_bf16)->pack(weights, packed, n, k, interleave);
}

/* Scratch for each thread, in bytes, when runs have at most `keys` keys and linear layers at most `depth` inputs. */
EXPORT int64_t scratch_bytes(int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t keys, int64_t depth)
{
    const int64_t padded = (keys + 64) / 64 * 64 + 64;
    const int64_t run = (2 * padded + 4 * 64) * head_dim * sizeof(float);
    const int64_t rows = ((256 << 10) + 32 * depth) * sizeof(float);
    const int64_t decode = 2 * num_heads * (head_dim + STATE_EXTRA) * sizeof(float) + num_kv_heads * PACK_BYTES +
                           2 * COPIED_KEYS * num_kv_heads * head_dim * sizeof(bf16);
    const int64_t most = run > rows ? (run > decode ? run : decode) : (rows > decode ? rows : decode);
    return (most + 4095) / 4096 * 4096;
}

EXPORT void run_linear(int64_t level, int64_t is_bf16, const Linear *linear, void *scratch)
{
    const Kernels *k = find_kernels(level, is_bf16);
    k->linear(linear, 0, (linear->n + k->panel - 1) / k->panel, scratch);
}

EXPORT void run_rms_norm(int64_t level, int64_t is_bf16, const void *x, const void *weight, void *y, int64_t rows, int64_t width,
                         double eps)
{
    find_kernels(level, is_bf16)->rms_norm(x, weight, y, rows, width, (float)eps);
}

EXPORT void run_rotate(int64_t level, int64_t is_bf16, const Rotation *rotation, int64_t num_tokens)
{
    find_kernels(level, is_bf16)->rotate(rotation, 0, num_tokens);
}

EXPORT void run_attend_decodes(int64_t level, int64_t is_bf16, const Attention *attention, const int32_t *tables,
                               const Decode *rows, int64_t count, void *scratch)
{
    find_kernels(level, is_bf16)->attend_decodes(attention, tables, rows, 0, count, 0, attention->num_kv_heads, scratch);
}

EXPORT void run_attend_run(int64_t level, int64_t is_bf16, const Attention *attention, const Run *run, void *scratch)
{
    find_kernels(level, is_bf16)->attend_run(attention, run, scratch);
}

EXPORT double run_largest(int64_t level, const float *logits, int64_t width, int64_t *is_unfit)
{
    bool unfit;
    const float result = find_kernels(level, level == AMX)->largest(logits, width, &unfit);
    *is_unfit = unfit;
    return result;
}

/* Reads memory and nothing else: what bandwidth there is for a benchmark to compare with. */
EXPORT int64_t read_memory(const int64_t *from, int64_t count)
{
    int64_t sums[8] = {0};
    for (int64_t i = 0; i + 8 <= count; i += 8) {
        __builtin_prefetch(from + i + 512, 0, 2);
        for (int j = 0; j < 8; j++)
            sums[j] += from[i + j];
    }
    return sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}
