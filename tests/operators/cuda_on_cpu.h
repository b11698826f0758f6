// Lets g++ compile the kernels as they are and run them on the CPU, one thread of the grid after another.
// A kernel is launched as the CUDA driver launches it: grid, block, and an array of pointers to its arguments.
#pragma once
#include <cstddef>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline

// One thread runs at a time, so these need no locks.
static inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value)
{
    const unsigned long long old = *address;
    *address = old + value;
    return old;
}
static inline long long atomicMin(long long* address, long long value)
{
    const long long old = *address;
    *address = value < old ? value : old;
    return old;
}

struct Axes {
    unsigned int x, y, z;
};
static thread_local Axes threadIdx, blockIdx, blockDim, gridDim;

template <typename Body>
static void for_each_place(const Axes& size, Axes& place, const Body& body)
{
    for (place.z = 0; place.z < size.z; ++place.z)
        for (place.y = 0; place.y < size.y; ++place.y)
            for (place.x = 0; place.x < size.x; ++place.x)
                body();
}

template <typename... Parameters, std::size_t... Index>
static void launch_indexed(void (*kernel)(Parameters...), void** arguments, std::index_sequence<Index...>)
{
    for_each_place(gridDim, blockIdx, [&] {
        for_each_place(blockDim, threadIdx, [&] { kernel(*static_cast<Parameters*>(arguments[Index])...); });
    });
}

template <typename... Parameters>
static void launch(void (*kernel)(Parameters...), const unsigned int* grid, const unsigned int* block, void** arguments)
{
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    launch_indexed(kernel, arguments, std::index_sequence_for<Parameters...>{});
}

// Bytes of each parameter, so that the caller can compare them with what it is about to pass.
template <typename... Parameters>
static std::size_t parameter_sizes(void (*)(Parameters...), std::size_t* sizes)
{
    const std::size_t each[] = {sizeof(Parameters)...};
    for (std::size_t i = 0; i < sizeof...(Parameters); ++i)
        sizes[i] = each[i];
    return sizeof...(Parameters);
}
