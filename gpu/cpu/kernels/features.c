/* Which kernels this CPU, this operating system and this build can run. */
#include <stdatomic.h>

#include "repertory.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

/* Linux gives tile registers only to processes that ask. */
static bool has_amx(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return false;
    bool tiles = d >> 24 & 1, tile_bf16 = d >> 22 & 1;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d))
        return false;
    bool vector_bf16 = a >> 5 & 1;
    return tiles && tile_bf16 && vector_bf16 && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* Asked once: under a hypervisor a cpuid instruction takes tens of microseconds. */
static bool has_level(int64_t level)
{
    static atomic_int known[NUM_LEVELS]; /* 0: not asked yet, 1: no, 2: yes */
    if (level < 0 || level >= NUM_LEVELS)
        return false;
    int answer = atomic_load_explicit(&known[level], memory_order_relaxed);
    if (!answer) {
        bool has = level == BASE || (level == AVX2 && has_avx2()) || (level == AVX512 && has_avx512()) ||
                   (level == AMX && has_amx());
        atomic_store_explicit(&known[level], answer = has ? 2 : 1, memory_order_relaxed);
    }
    return answer == 2;
}

const Kernels *find_kernels(int64_t level, bool is_bf16)
{
    static const Kernels *const tables[NUM_LEVELS][2] = {
        {&base_f32, &base_bf16}, {&avx2_f32, &avx2_bf16}, {&avx512_f32, &avx512_bf16_kernels}, {NULL, &amx_bf16_kernels}};
    return has_level(level) ? tables[level][is_bf16] : NULL;
}
#else
const Kernels *find_kernels(int64_t level, bool is_bf16)
{
    return level == BASE ? (is_bf16 ? &base_bf16 : &base_f32) : NULL;
}
#endif
