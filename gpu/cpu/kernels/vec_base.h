/* Vectors of four floats in plain C, for CPUs without the instruction sets below. Slow and portable. */
#include <math.h>
#include <string.h>
#include "repertory.h"

typedef struct {
    float lane[4];
} vf;

#define LANES 4
#define BLOCK_ROWS 4 /* rows whose accumulators fit in the registers, two vectors each */

#define EACH_LANE for (int i = 0; i < LANES; i++)

static inline vf vf_set1(float x) { vf r; EACH_LANE r.lane[i] = x; return r; }
static inline vf vf_add(vf a, vf b) { EACH_LANE a.lane[i] += b.lane[i]; return a; }
static inline vf vf_sub(vf a, vf b) { EACH_LANE a.lane[i] -= b.lane[i]; return a; }
static inline vf vf_mul(vf a, vf b) { EACH_LANE a.lane[i] *= b.lane[i]; return a; }
static inline vf vf_div(vf a, vf b) { EACH_LANE a.lane[i] /= b.lane[i]; return a; }
static inline vf vf_fma(vf a, vf b, vf c) { EACH_LANE c.lane[i] += a.lane[i] * b.lane[i]; return c; }
/* b where either is NaN, as x86 has it. */
static inline vf vf_max(vf a, vf b) { EACH_LANE a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; return a; }
static inline vf vf_load_f32(const float *p) { vf r; memcpy(&r, p, sizeof r); return r; }
static inline void vf_store_f32(float *p, vf a) { memcpy(p, &a, sizeof a); }

/* `a` where `limits` > `key`, minus infinity's stand-in elsewhere. */
static inline vf vf_visible(vf a, vf limits, float key)
{
    EACH_LANE a.lane[i] = limits.lane[i] > key ? a.lane[i] : -1e30f;
    return a;
}

static inline float vf_sum(vf a) { float s = 0; EACH_LANE s += a.lane[i]; return s; }
static inline float vf_largest(vf a) { float s = a.lane[0]; EACH_LANE s = s > a.lane[i] ? s : a.lane[i]; return s; }
static inline vf vf_exp2(vf a) { EACH_LANE a.lane[i] = exp2f(a.lane[i] < -126.f ? -126.f : a.lane[i]); return a; }

static inline vf vf_load_bf16(const bf16 *p)
{
    vf r;
    EACH_LANE { uint32_t bits = (uint32_t)p[i] << 16; memcpy(&r.lane[i], &bits, 4); }
    return r;
}

static inline void vf_store_bf16(bf16 *p, vf a)
{
    EACH_LANE {
        uint32_t bits;
        memcpy(&bits, &a.lane[i], 4);
        /* Nearest even; a NaN must not round into infinity. */
        p[i] = a.lane[i] != a.lane[i] ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
}
