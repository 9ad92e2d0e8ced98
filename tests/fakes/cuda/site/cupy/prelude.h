// What CUDA C has and C++ lacks, as far as a kernel that copies needs it. The threads of a grid run
// one after the other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __constant__ static
#define __restrict__ __restrict

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct alignas(16) longlong2 { long long x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

static thread_local uint3 threadIdx, blockIdx;
static thread_local dim3 blockDim, gridDim;
static const int warpSize = 32;

template <class T> inline T __ldg(const T *at) { return *at; }
template <class T> inline T __ldcs(const T *at) { return *at; }
template <class T> inline T __ldcg(const T *at) { return *at; }
template <class T> inline T __ldcv(const T *at) { return *at; }
template <class T> inline void __stcs(T *at, T value) { *at = value; }
template <class T> inline void __stcg(T *at, T value) { *at = value; }
template <class T> inline void __stwt(T *at, T value) { *at = value; }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }

namespace kvd {

template <class... P, std::size_t... I>
void call(void (*kernel)(P...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<P>> *>(arguments[I])...);
}

template <class... P>
void run(void (*kernel)(P...), const unsigned *grid, const unsigned *block, void **arguments) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++)
    for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++)
    for (threadIdx.z = 0; threadIdx.z < block[2]; threadIdx.z++)
    for (threadIdx.y = 0; threadIdx.y < block[1]; threadIdx.y++)
    for (threadIdx.x = 0; threadIdx.x < block[0]; threadIdx.x++)
        call(kernel, arguments, std::index_sequence_for<P...>{});
}

// The bytes of a parameter; 0 past the last.
template <class... P> unsigned long size(void (*)(P...), unsigned long which) {
    const unsigned long sizes[] = {sizeof(P)..., 0};
    return which < sizeof...(P) ? sizes[which] : 0;
}

}  // namespace kvd
