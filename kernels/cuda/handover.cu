// Hand-over of one MoE layer's tokens from a GPU stream to the CPU engine and back, by flags in mapped host memory.
//
// lk_send copies hidden_states, topk_ids and topk_weights into a slot of pinned memory and rings; lk_receive waits for
// the answer and copies the result rows into the output tensor. Both are ordinary kernels of the caller's stream, so they
// can be captured in a CUDA graph and replayed: nothing in them changes from step to step but an epoch, which the
// GPU itself counts in device memory. Flags are compared by >=, so that a late or a lost step leaves no stale flag behind.
//
// Order: GPU: payload, system fence, block barrier, st.release.sys of the flag. CPU: acquire of the flag, payload, work,
// release of the done flag. GPU: ld.acquire.sys of the done flag, then reads that bypass the GPU's caches.
//
// Compiled at run time for the device's own architecture (7.0 or later: acquire and release loads of system scope). The
// host prepends the offsets of the slot's header and the launch bounds as LK_* macros; there are no headers.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Device memory of one slot. Zeroed once by the host; only these kernels touch it.
struct SlotState {
    u64 epoch;    // of the last send
    u64 ready;    // 2 * epoch + failed: block 0 of lk_receive tells the others
    u32 arrived;  // blocks of the running lk_send that have written their part
};

__device__ __forceinline__ u64 now_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ u64 load_acquire_sys(const void* at) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void store_release_sys(void* at, u64 v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}

__device__ __forceinline__ u32 load_relaxed_sys(const void* at) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void store_relaxed_sys(void* at, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

__device__ __forceinline__ u64 load_acquire_gpu(const u64* at) {
    u64 v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void store_release_gpu(u64* at, u64 v) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(v) : "memory");
}

__device__ __forceinline__ u32 add_acq_rel_gpu(u32* at, u32 v) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(v) : "memory");
    return old;
}

// Units of a row copy. Host memory is read past the caches: a line of an earlier step must not answer.
__device__ __forceinline__ uint4 load_host(const uint4* at) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}
__device__ __forceinline__ u32 load_host(const u32* at) { return load_relaxed_sys(at); }
__device__ __forceinline__ u16 load_host(const u16* at) {
    u16 v;
    asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint4 zero(const uint4*) { return make_uint4(0, 0, 0, 0); }
__device__ __forceinline__ u32 zero(const u32*) { return 0; }
__device__ __forceinline__ u16 zero(const u16*) { return 0; }

// Which rows are tokens: a mask over the rows, a count in device memory, both or neither.
struct Real {
    const u8* is_padding;
    const int* num_rows;
    __device__ __forceinline__ bool all() const { return !is_padding && !num_rows; }
    __device__ __forceinline__ bool row(u32 r) const {
        return !(is_padding && is_padding[r]) && !(num_rows && (int)r >= *num_rows);
    }
};

// Copies in flight per thread: the latency of the link, not its rate, bounds a step of few rows.
#define LK_UNROLL 4

template <typename Unit>
__device__ __forceinline__ void rows_to_host(Unit* to, const Unit* from, u32 units_per_row, u32 rows, Real real) {
    const u32 total = units_per_row * rows, stride = gridDim.x * blockDim.x;
    const bool all = real.all();
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < total; at += LK_UNROLL * stride) {
        Unit v[LK_UNROLL];
        bool live[LK_UNROLL];
#pragma unroll
        for (int u = 0; u < LK_UNROLL; u++) {
            const u32 i = at + u * stride;
            live[u] = i < total && (all || real.row(i / units_per_row));
            if (live[u]) v[u] = from[i];
        }
#pragma unroll
        for (int u = 0; u < LK_UNROLL; u++)
            if (live[u]) to[at + u * stride] = v[u];
    }
}

template <typename Unit>
__device__ __forceinline__ void rows_from_host(
    Unit* to, const Unit* from, u32 units_per_row, u32 rows, Real real, bool failed) {
    const u32 total = units_per_row * rows, stride = gridDim.x * blockDim.x;
    const bool all = real.all();
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < total; at += LK_UNROLL * stride) {
        Unit v[LK_UNROLL];
#pragma unroll
        for (int u = 0; u < LK_UNROLL; u++) {
            const u32 i = at + u * stride;
            const bool wanted = !failed && i < total && (all || real.row(i / units_per_row));
            v[u] = wanted ? load_host(from + i) : zero(from);
        }
#pragma unroll
        for (int u = 0; u < LK_UNROLL; u++) {
            const u32 i = at + u * stride;
            if (i < total) to[i] = v[u];
        }
    }
}

// The widest unit that both addresses and the row allow.
__device__ __forceinline__ u32 unit_bytes(const void* a, const void* b, u32 row_bytes) {
    const u64 low = (u64)a | (u64)b | row_bytes;
    return low % 16 == 0 ? 16 : low % 4 == 0 ? 4 : 2;
}

// Writes rows [rows, row_bytes], topk_ids and topk_weights [rows, top_k] into the slot and rings with the next epoch.
// Padding rows are not copied and get ids of -1. After a failure the slot belongs to nobody, and nothing is written.
extern "C" __global__ void __launch_bounds__(LK_THREADS) lk_send(
    const u8* hidden_states, const int* topk_ids, const float* topk_weights, const u8* is_padding, const int* num_rows,
    u8* slot, u8* slot_hidden_states, int* slot_topk_ids, float* slot_topk_weights, SlotState* state, const u32* failed,
    u32 rows, u32 row_bytes, u32 top_k, u32 layer) {
    if (*failed) return;
    const Real real = {is_padding, num_rows};
    const u32 unit = unit_bytes(hidden_states, slot_hidden_states, row_bytes);
    if (unit == 16)
        rows_to_host((uint4*)slot_hidden_states, (const uint4*)hidden_states, row_bytes / 16, rows, real);
    else if (unit == 4)
        rows_to_host((u32*)slot_hidden_states, (const u32*)hidden_states, row_bytes / 4, rows, real);
    else
        rows_to_host((u16*)slot_hidden_states, (const u16*)hidden_states, row_bytes / 2, rows, real);
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < rows * top_k; at += gridDim.x * blockDim.x) {
        const bool live = real.row(at / top_k);
        slot_topk_ids[at] = live ? topk_ids[at] : -1;
        slot_topk_weights[at] = live ? topk_weights[at] : 0.0f;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (gridDim.x > 1) {
        if (add_acq_rel_gpu(&state->arrived, 1) != gridDim.x - 1) return;
        state->arrived = 0;
    }
    const u64 epoch = state->epoch + 1;
    state->epoch = epoch;
    store_relaxed_sys(slot + LK_LAYER_OFFSET, layer);
    store_relaxed_sys(slot + LK_ROWS_OFFSET, rows);
    store_relaxed_sys(slot + LK_ROW_BYTES_OFFSET, row_bytes);
    store_relaxed_sys(slot + LK_TOP_K_OFFSET, top_k);
    store_release_sys(slot + LK_REQUEST_OFFSET, epoch);
}

// Gives up on the engine: later kernels do not wait, and the host finds the epoch in the slot.
__device__ __forceinline__ void give_up(u8* slot, u32* failed, u64 epoch) {
    *failed = 1;
    __threadfence();
    store_release_sys(slot + LK_GPU_FAULT_OFFSET, epoch);
}

// Waits for the answer to the last send through this slot and writes it to output [rows, row_bytes]; zeros for padding
// rows, and for all rows when the engine has failed or does not answer within limit_ns.
extern "C" __global__ void __launch_bounds__(LK_THREADS) lk_receive(
    u8* output, const u8* is_padding, const int* num_rows, u8* slot, const u8* slot_output, SlotState* state,
    u32* failed, u32 rows, u32 row_bytes, u64 limit_ns) {
    __shared__ u32 bad;
    if (threadIdx.x == 0) {
        const u64 epoch = state->epoch;
        u32 failure = *(volatile u32*)failed;
        const u64 start = now_ns();
        // One block polls over the link, which more pollers would only slow down; the others wait on device memory.
        if (blockIdx.x == 0) {
            for (u32 polls = 1; !failure && load_acquire_sys(slot + LK_DONE_OFFSET) < epoch; polls++) {
                if (polls % 64 == 0 && now_ns() - start > limit_ns) {
                    give_up(slot, failed, epoch);
                    failure = 1;
                }
            }
            if (!failure && load_relaxed_sys(slot + LK_STATUS_OFFSET) != 0) {
                *(volatile u32*)failed = 1;
                failure = 1;
            }
            if (gridDim.x > 1) store_release_gpu(&state->ready, 2 * epoch + failure);
        } else if (!failure) {
            u64 ready;
            u32 polls = 1;
            while ((ready = load_acquire_gpu(&state->ready)) < 2 * epoch) {
                __nanosleep(64);
                // Block 0 reports first, unless the device never gave it a place to run.
                if (polls++ % 1024 == 0 && now_ns() - start > limit_ns + limit_ns / 8) {
                    give_up(slot, failed, epoch);
                    ready = 1;
                    break;
                }
            }
            failure = (u32)ready & 1;
        }
        bad = failure;
    }
    __syncthreads();
    const Real real = {is_padding, num_rows};
    const u32 unit = unit_bytes(output, slot_output, row_bytes);
    if (unit == 16)
        rows_from_host((uint4*)output, (const uint4*)slot_output, row_bytes / 16, rows, real, bad);
    else if (unit == 4)
        rows_from_host((u32*)output, (const u32*)slot_output, row_bytes / 4, rows, real, bad);
    else
        rows_from_host((u16*)output, (const u16*)slot_output, row_bytes / 2, rows, real, bad);
}
