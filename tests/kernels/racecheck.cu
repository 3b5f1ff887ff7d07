// What compute-sanitizer's racecheck makes of the barriers that Triton's warp_specialize starts and ends with.
//
// Warps 0 to 3 leave a start state for each of warps 4 to 11 in shared memory, and at the end another one. Every
// access is ordered by barriers of the whole block, reached from different lines. With -DPARTIAL=1 the roles also
// use barriers of 128 threads among themselves, which order nothing here; then racecheck reports hazards between
// the states' writes and reads. With -DPARTIAL=0 it reports none.
//
// nvcc -std=c++17 -lineinfo -DPARTIAL=1 -gencode=arch=compute_90a,code=sm_90a racecheck.cu
// compute-sanitizer --tool racecheck ./a.out

#include <cstdio>
#include <cuda_runtime.h>

#define BLOCK_BARRIER() asm volatile("barrier.sync 1;" ::: "memory")
#define PARTIAL_BARRIER(id) \
  if (PARTIAL) asm volatile("bar.sync " #id ", 128;" ::: "memory")

__global__ void __launch_bounds__(384, 1) start_and_end(int *out) {
  __shared__ __align__(16) volatile unsigned char state[16];
  auto states = (volatile unsigned *)state;
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (warp < 4) {
    PARTIAL_BARRIER(0);
    states[1] = 0, states[2] = 0x01010101u;  // of warps 4 to 11
    BLOCK_BARRIER();
    BLOCK_BARRIER();
    for (int i = 0; i < 8; i++) PARTIAL_BARRIER(0);
    BLOCK_BARRIER();
    states[1] = 0x04040404u, states[2] = 0x04040404u;
    BLOCK_BARRIER();
    return;
  }
  while (true) {
    BLOCK_BARRIER();
    int mine = state[warp];
    if (mine == 4) return;
    BLOCK_BARRIER();
    if (warp < 8)
      for (int i = 0; i < 4; i++) PARTIAL_BARRIER(2);
    out[threadIdx.x] = mine;
    BLOCK_BARRIER();
  }
}

int main() {
  int *out;
  cudaMalloc(&out, 384 * sizeof(int));
  start_and_end<<<4, 384>>>(out);
  printf("partial %d: %s\n", PARTIAL, cudaGetErrorString(cudaDeviceSynchronize()));
}
