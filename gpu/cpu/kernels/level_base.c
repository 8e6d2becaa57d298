/* The kernels in plain C: any CPU. */
#include "vec_base.h"
#include "vectors.h"

const Kernels base_f32 = KERNELS(f32), base_bf16 = KERNELS(bf16);
