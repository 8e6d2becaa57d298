/* All kernels of one vector instruction set, for both elements. level_*.c includes it after its vec_*.h. */
#include <math.h>
#include <string.h>

#define LOG2E 1.44269504f

enum {
    RUN_KEYS = 64, /* that a decode row looks at together */
    STEP_KEYS = 48 /* in one step of a run's softmax; a multiple of every BLOCK_ROWS */
};

static inline float float_of(bf16 x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Nearest even; a NaN must not round into infinity. */
static inline bf16 bf16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* Rows of the next block: the widest there is code for. */
static inline int64_t block_rows(int64_t rows_left)
{
    if (rows_left >= BLOCK_ROWS)
        return BLOCK_ROWS;
    return rows_left >= 8 && LANES == 16 ? 8 : rows_left >= 4 ? 4 : rows_left >= 2 ? 2 : 1;
}

/* Rows of depth k whose floats fill half of a 2 MiB L2, in whole blocks. */
static inline int64_t rows_in_cache(int64_t k)
{
    int64_t blocks = (256 << 10) / (k * BLOCK_ROWS);
    return (blocks < 1 ? 1 : blocks) * BLOCK_ROWS;
}

#include "largest.h"

#define element float
#define FN(name) name##_f32
#define LOAD vf_load_f32
#define STORE vf_store_f32
#define TO_FLOAT(x) (x)
#define FROM_FLOAT(x) (x)
#include "elementwise.h"
#include "linear.h"
#include "attention_decode.h"
#include "attention_run.h"
#undef element
#undef FN
#undef LOAD
#undef STORE
#undef TO_FLOAT
#undef FROM_FLOAT

#define element bf16
#define FN(name) name##_bf16
#define LOAD vf_load_bf16
#define STORE vf_store_bf16
#define TO_FLOAT float_of
#define FROM_FLOAT bf16_of
#include "elementwise.h"
#include "linear.h"
#include "attention_decode.h"
#include "attention_run.h"

#define KERNELS(type) \
    {2 * LANES, pack_##type, linear_##type, rms_norm_##type, rotate_##type, attend_decodes_##type, attend_run_##type, largest}
