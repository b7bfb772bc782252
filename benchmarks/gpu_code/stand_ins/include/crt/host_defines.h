// What driver_types.h needs of CUDA's compiler, which the wheels lack.
#pragma once
#define __device_builtin__
#define __cudart_builtin__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __host__
#define __device__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_DEVICE
#define __CUDA_DEPRECATED
#define __CUDA_ARCH_HAS_FEATURE__(feature) 0
#define __specialization_static static
