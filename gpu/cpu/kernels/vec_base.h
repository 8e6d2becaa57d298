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

/* a * 2^power for whole powers of -126 and more. */
static inline vf vf_scale(vf a, vf power) { EACH_LANE a.lane[i] = ldexpf(a.lane[i], (int)power.lane[i]); return a; }

/* `a` where it is above `key`, 0 elsewhere; and how many are. */
static inline vf vf_above(vf a, float key) { EACH_LANE a.lane[i] = a.lane[i] > key ? a.lane[i] : 0; return a; }
static inline int vf_num_above(vf a, float key) { int n = 0; EACH_LANE n += a.lane[i] > key; return n; }

/* Those above `low` and not above `high`, to `to`, which has room for a whole vector. Returns their number. */
static inline int vf_pack(float *to, vf a, float low, float high)
{
    int n = 0;
    EACH_LANE { to[n] = a.lane[i]; n += a.lane[i] > low && a.lane[i] <= high; }
    return n;
}

/* Sums in double. */
typedef struct {
    double lane[4];
} vd;

static inline vd vd_zero(void) { vd r = {{0}}; return r; }
static inline vd vd_add(vd s, vf a) { EACH_LANE s.lane[i] += a.lane[i]; return s; }
static inline double vd_sum(vd s) { return s.lane[0] + s.lane[1] + (s.lane[2] + s.lane[3]); }
