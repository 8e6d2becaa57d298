/* Vectors of eight floats: AVX2 and FMA. */
#include <immintrin.h>
#include "repertory.h"

typedef __m256 vf;

#define LANES 8
#define BLOCK_ROWS 6 /* rows whose accumulators fit in the registers, two vectors each */

static inline vf vf_set1(float x) { return _mm256_set1_ps(x); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
/* b where either is NaN. */
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_load_f32(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store_f32(float *p, vf a) { _mm256_storeu_ps(p, a); }

/* `a` where `limits` > `key`, minus infinity's stand-in elsewhere. */
static inline vf vf_visible(vf a, vf limits, float key)
{
    return _mm256_blendv_ps(vf_set1(-1e30f), a, _mm256_cmp_ps(limits, vf_set1(key), _CMP_GT_OQ));
}

static inline float vf_sum(vf a)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

static inline float vf_largest(vf a)
{
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

static inline vf vf_load_bf16(const bf16 *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

static inline void vf_store_bf16(bf16 *p, vf a)
{
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); /* must not round into infinity */
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}

/* 2^a for a <= 127, to float's precision; the series of exp(f * ln 2) for |f| <= 1/2. NaN stays NaN. */
static inline vf vf_exp2(vf a)
{
    a = _mm256_max_ps(vf_set1(-126.f), _mm256_min_ps(vf_set1(127.f), a));
    vf whole = _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf f = vf_sub(a, whole);
    vf p = vf_set1(1.52527338e-5f);
    p = vf_fma(p, f, vf_set1(1.54035304e-4f));
    p = vf_fma(p, f, vf_set1(1.33335581e-3f));
    p = vf_fma(p, f, vf_set1(9.61812911e-3f));
    p = vf_fma(p, f, vf_set1(5.55041087e-2f));
    p = vf_fma(p, f, vf_set1(2.40226507e-1f));
    p = vf_fma(p, f, vf_set1(6.93147181e-1f));
    p = vf_fma(p, f, vf_set1(1.f));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23)));
}

/* a * 2^power for whole powers of -126 and more, and results of 2^-126 and more. */
static inline vf vf_scale(vf a, vf power)
{
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(power), 23)));
}

/* `a` where it is above `key`, 0 elsewhere; and how many are. */
static inline vf vf_above(vf a, float key) { return _mm256_and_ps(a, _mm256_cmp_ps(a, vf_set1(key), _CMP_GT_OQ)); }

static inline int vf_num_above(vf a, float key)
{
    return __builtin_popcount(_mm256_movemask_ps(_mm256_cmp_ps(a, vf_set1(key), _CMP_GT_OQ)));
}

/* Those above `low` and not above `high`, to `to`, which has room for a whole vector. Returns their number. */
static inline int vf_pack(float *to, vf a, float low, float high)
{
    const vf above_low = _mm256_cmp_ps(a, vf_set1(low), _CMP_GT_OQ), to_high = _mm256_cmp_ps(a, vf_set1(high), _CMP_LE_OQ);
    float lanes[LANES];
    _mm256_storeu_ps(lanes, a);
    int n = 0;
    for (int mask = _mm256_movemask_ps(_mm256_and_ps(above_low, to_high)); mask; mask &= mask - 1)
        to[n++] = lanes[__builtin_ctz(mask)];
    return n;
}

/* Sums in double. */
typedef struct {
    __m256d low, high;
} vd;

static inline vd vd_zero(void) { return (vd){_mm256_setzero_pd(), _mm256_setzero_pd()}; }

static inline vd vd_add(vd s, vf a)
{
    s.low = _mm256_add_pd(s.low, _mm256_cvtps_pd(_mm256_castps256_ps128(a)));
    s.high = _mm256_add_pd(s.high, _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
    return s;
}

static inline double vd_sum(vd s)
{
    double lanes[4];
    _mm256_storeu_pd(lanes, _mm256_add_pd(s.low, s.high));
    return lanes[0] + lanes[1] + (lanes[2] + lanes[3]);
}
