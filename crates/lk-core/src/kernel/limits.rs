//! The machine's own limits: how fast memory is read, how fast each kind of product is computed.
//!
//! Threads are pinned to the allowed CPUs in order and start together; a rate is the work of all of them over the time of the
//! slowest.

use crate::simd::Cpu;
use crate::{Error, Result};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Arithmetic peaks by family name, GFLOP/s (GOP/s for int8).
pub(crate) type Peaks = Vec<(&'static str, f64)>;

/// CPUs that the calling thread may run on, ascending.
pub fn allowed_cpus() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: an all-zero cpu_set_t is an empty set; the call writes at most its size.
        let set = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            if libc::sched_getaffinity(0, std::mem::size_of_val(&set), &raw mut set) != 0 {
                return vec![0];
            }
            set
        };
        let all = 8 * std::mem::size_of_val(&set);
        // SAFETY: the index is below the set's size in bits.
        (0..all).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
    }
    #[cfg(not(target_os = "linux"))]
    vec![0]
}

/// Pins the calling thread to one CPU; false if the system refuses.
pub fn pin_to(cpu: usize) -> bool {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: an all-zero cpu_set_t is an empty set; CPU_SET checks its index.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(cpu, &mut set);
            libc::sched_setaffinity(0, std::mem::size_of_val(&set), &raw const set) == 0
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = cpu;
        false
    }
}

/// Runs `work` on `threads` pinned threads (default: all allowed CPUs) `rounds` times, each time from a common start, after
/// `prepare(i)` once on thread `i`. Returns, per round, the results by thread and the time from the common start to the last
/// end.
///
/// # Errors
///
/// [`Error::Poisoned`] if a thread panics.
pub fn together<S: Send, R: Send>(
    threads: Option<usize>,
    prepare: impl Fn(usize) -> S + Sync,
    work: impl Fn(&mut S) -> R + Sync,
    rounds: usize,
) -> Result<Vec<(Vec<R>, Duration)>> {
    let cpus = allowed_cpus();
    let threads = threads.unwrap_or(cpus.len()).max(1);
    let barrier = Barrier::new(threads);
    let (prepare, work, barrier, cpus) = (&prepare, &work, &barrier, &cpus);
    std::thread::scope(|scope| {
        let mut handles = Vec::with_capacity(threads);
        for i in 0..threads {
            let body = move || {
                pin_to(cpus[i % cpus.len()]);
                let mut state = prepare(i);
                (0..rounds)
                    .map(|_| {
                        barrier.wait();
                        let start = Instant::now();
                        let result = work(&mut state);
                        (result, start, Instant::now())
                    })
                    .collect::<Vec<_>>()
            };
            // A thread that is missing would leave the others at the barrier: all are made or the process has no threads left.
            handles.push(scope.spawn(body));
        }
        let mut per_thread = Vec::with_capacity(threads);
        for handle in handles {
            per_thread.push(handle.join().map_err(|_| Error::Poisoned {
                worker: per_thread.len(),
                message: "a measuring thread panicked".to_owned(),
            })?);
        }
        let mut out = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let mut results = Vec::with_capacity(threads);
            let (mut first, mut last) = (None::<Instant>, None::<Instant>);
            for thread in &mut per_thread {
                let (result, start, end) = thread.remove(0);
                first = Some(first.map_or(start, |f| f.min(start)));
                last = Some(last.map_or(end, |l| l.max(end)));
                results.push(result);
            }
            let time = last.zip(first).map_or(Duration::MAX, |(l, f)| l - f);
            out.push((results, time));
        }
        Ok(out)
    })
}

/// Read bandwidth from memory in GB/s with `threads` threads (default: all allowed CPUs), over 1 GiB in all: more than any
/// cache's share of one process. Best of five rounds.
///
/// # Errors
///
/// [`Error::OutOfMemory`] if the memory cannot be had.
pub fn read_bandwidth(threads: Option<usize>) -> Result<f64> {
    read_bandwidth_over(threads, 1 << 30, 5)
}

/// The same over `bytes` in all, best of `rounds`.
///
/// # Errors
///
/// As [`read_bandwidth`].
pub fn read_bandwidth_over(threads: Option<usize>, bytes: usize, rounds: usize) -> Result<f64> {
    let cpu = Cpu::detect();
    let count = threads.unwrap_or_else(|| allowed_cpus().len()).max(1);
    let words = (bytes / count / 8).next_multiple_of(64);
    let rounds = together(
        Some(count),
        |_| huge_vec(words, 1u64).unwrap_or_default(),
        |data| {
            // SAFETY: the features are those that `cpu` reports.
            let sum = unsafe {
                #[cfg(target_arch = "x86_64")]
                match (cpu.avx512(), cpu.avx2()) {
                    (true, _) => x86::read_avx512(data),
                    (_, true) => x86::read_avx2(data),
                    _ => read_scalar(data),
                }
                #[cfg(not(target_arch = "x86_64"))]
                read_scalar(data)
            };
            std::hint::black_box(sum);
            data.len() * 8
        },
        rounds.max(1),
    )?;
    let best = rounds
        .iter()
        .map(|(bytes, time)| bytes.iter().sum::<usize>() as f64 / time.as_secs_f64() / 1e9)
        .fold(0.0, f64::max);
    if best == 0.0 {
        return Err(Error::OutOfMemory {
            node: 0,
            bytes,
            detail: "measuring the read bandwidth; free some memory".to_owned(),
        });
    }
    Ok(best)
}

/// A vector on huge pages where the system has them, as the weights' arena is: with small pages address translation would be
/// a part of what is measured. `None` if the memory cannot be had.
pub fn huge_vec<T: Copy>(len: usize, value: T) -> Option<Vec<T>> {
    let mut data = Vec::<T>::new();
    data.try_reserve_exact(len).ok()?;
    advise_huge(data.as_mut_ptr().cast(), len * std::mem::size_of::<T>());
    data.resize(len, value);
    Some(data)
}

fn advise_huge(p: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        let page = 4096;
        let start = p.addr().next_multiple_of(page);
        let end = (p.addr() + bytes) / page * page;
        if end > start {
            // SAFETY: whole pages of our own allocation; the advice changes no contents.
            unsafe { libc::madvise(p.with_addr(start).cast(), end - start, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (p, bytes);
}

fn read_scalar(data: &[u64]) -> u64 {
    data.iter().fold(0, |sum, x| sum ^ x)
}

/// Peak rates of the products that kernels are made of.
///
/// # Errors
///
/// If a measuring thread panics.
pub(crate) fn peaks(threads: Option<usize>, cpu: Cpu) -> Result<Peaks> {
    /// Runs some turns of a product and returns the operations done.
    type Loop = unsafe fn(usize) -> f64;
    let mut loops: Vec<(&'static str, Loop)> = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        if cpu.avx512() {
            loops.push(("f32fma", x86::fma_avx512));
        } else if cpu.avx2() {
            loops.push(("f32fma", x86::fma_avx2));
        }
        if cpu.avx512_bf16() {
            loops.push(("bf16dot", x86::bf16_dot));
        }
        if cpu.avx512_vnni() {
            loops.push(("i8dot", x86::i8_dot));
        }
        if cpu.amx() {
            loops.push(("bf16amx", x86::amx_bf16));
            loops.push(("i8amx", x86::amx_i8));
        }
    }
    let _ = cpu;
    if loops.is_empty() {
        loops.push(("f32fma", fma_scalar));
    }
    let mut out = Vec::new();
    for (name, body) in loops {
        let work = |(): &mut ()| {
            // SAFETY: each loop is listed only for a CPU with its features.
            unsafe { body(PEAK_ITERATIONS) }
        };
        let rounds = together(threads, |_| (), work, 4)?;
        let best = rounds.iter().map(|(ops, t)| ops.iter().sum::<f64>() / t.as_secs_f64() / 1e9);
        out.push((name, best.fold(0.0, f64::max)));
    }
    Ok(out)
}

/// Turns of a peak loop: some milliseconds.
const PEAK_ITERATIONS: usize = 400_000;

/// # Safety
///
/// None; the signature is that of its siblings.
unsafe fn fma_scalar(iterations: usize) -> f64 {
    let mut acc = [[0f32; 8]; 8];
    for _ in 0..iterations / 4 {
        for lane in acc.iter_mut().flatten() {
            *lane = *lane * std::hint::black_box(0.5) + 1.0;
        }
    }
    std::hint::black_box(acc);
    (iterations / 4 * 64 * 2) as f64
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::simd::amx::{TileConfig, release};
    use std::arch::asm;
    use std::arch::x86_64::*;

    /// Bytes ahead of the read position that are asked for.
    const AHEAD: usize = 4096;

    /// # Safety
    ///
    /// AVX-512 F. `data.len()` is a multiple of 64.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn read_avx512(data: &[u64]) -> u64 {
        let mut acc = [_mm512_setzero_si512(); 8];
        for chunk in data.chunks_exact(64) {
            let p = chunk.as_ptr();
            for i in 0..8 {
                // SAFETY: the chunk has 64 words; a prefetch may name any address.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(8 * i + AHEAD / 8).cast());
                    acc[i] = _mm512_xor_si512(acc[i], _mm512_loadu_si512(p.add(8 * i).cast()));
                }
            }
        }
        let all = acc.iter().fold(_mm512_setzero_si512(), |a, b| _mm512_xor_si512(a, *b));
        _mm512_reduce_add_epi64(all) as u64
    }

    /// # Safety
    ///
    /// AVX2. `data.len()` is a multiple of 64.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn read_avx2(data: &[u64]) -> u64 {
        let mut acc = [_mm256_setzero_si256(); 8];
        for chunk in data.chunks_exact(64) {
            let p = chunk.as_ptr();
            for i in 0..16 {
                // SAFETY: the chunk has 64 words; a prefetch may name any address.
                unsafe {
                    if i % 2 == 0 {
                        _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(4 * i + AHEAD / 8).cast());
                    }
                    acc[i % 8] = _mm256_xor_si256(acc[i % 8], _mm256_loadu_si256(p.add(4 * i).cast()));
                }
            }
        }
        let all = acc.iter().fold(_mm256_setzero_si256(), |a, b| _mm256_xor_si256(a, *b));
        _mm256_extract_epi64::<0>(all) as u64 ^ _mm256_extract_epi64::<1>(all) as u64
    }

    /// Sixteen independent accumulators hide the latency on every core so far.
    const CHAINS: usize = 16;

    macro_rules! peak {
        ($name:ident, $feature:literal, $ty:ty, $zero:expr, $flops:expr, $asm:literal, $reg:ident) => {
            /// # Safety
            ///
            /// The features named in the attribute.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name(iterations: usize) -> f64 {
                let mut acc: [$ty; CHAINS] = [$zero; CHAINS];
                let (a, b) = ($zero, $zero);
                for _ in 0..iterations {
                    for c in &mut acc {
                        // SAFETY: the caller's promise; registers only. In assembler so that nothing is folded.
                        unsafe {
                            asm!($asm, inout($reg) *c, in($reg) a, in($reg) b, options(nomem, nostack, preserves_flags, pure));
                        }
                    }
                }
                std::hint::black_box(acc);
                (iterations * CHAINS * $flops) as f64
            }
        };
    }

    peak!(fma_avx512, "avx512f", __m512, _mm512_setzero_ps(), 32, "vfmadd231ps {}, {}, {}", zmm_reg);
    peak!(fma_avx2, "avx2,fma", __m256, _mm256_setzero_ps(), 16, "vfmadd231ps {}, {}, {}", ymm_reg);
    peak!(bf16_dot, "avx512f,avx512bf16", __m512, _mm512_setzero_ps(), 64, "vdpbf16ps {}, {}, {}", zmm_reg);
    peak!(i8_dot, "avx512f,avx512vnni", __m512i, _mm512_setzero_si512(), 128, "vpdpbusd {}, {}, {}", zmm_reg);

    macro_rules! tile_peak {
        ($name:ident, $op:literal, $flops:expr) => {
            /// # Safety
            ///
            /// AMX is available.
            pub(super) unsafe fn $name(iterations: usize) -> f64 {
                let turns = iterations / 8;
                // SAFETY: the caller's promise; registers only.
                unsafe {
                    TileConfig::new([16; 8]).load();
                    for _ in 0..turns {
                        asm!(
                            concat!($op, " tmm0, tmm4, tmm6"),
                            concat!($op, " tmm1, tmm4, tmm7"),
                            concat!($op, " tmm2, tmm5, tmm6"),
                            concat!($op, " tmm3, tmm5, tmm7"),
                            options(nomem, nostack, preserves_flags)
                        );
                    }
                    release();
                }
                (turns * 4 * $flops) as f64
            }
        };
    }

    tile_peak!(amx_bf16, "tdpbf16ps", 16 * 16 * 32 * 2);
    tile_peak!(amx_i8, "tdpbssd", 16 * 16 * 64 * 2);
}
