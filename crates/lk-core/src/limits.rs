//! Limits of the machine, measured.
use crate::{Error, Result};
use std::collections::HashMap;
use std::time::Instant;

/// Read bandwidth in GB/s.
pub fn read_bandwidth(threads: Option<usize>) -> Result<f64> {
    let threads = threads.unwrap_or(1).max(1);
    let len = (1usize << 29) / threads / 8;
    let data: Vec<Vec<u64>> = (0..threads).map(|_| vec![1u64; len]).collect();
    let mut best = 0.0f64;
    for _ in 0..3 {
        let t = Instant::now();
        std::thread::scope(|s| {
            for d in &data {
                s.spawn(move || std::hint::black_box(d.iter().copied().fold(0u64, u64::wrapping_add)));
            }
        });
        best = best.max((len * threads * 8) as f64 / t.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}
/// Peaks.
pub fn compute_peaks(_threads: Option<usize>) -> Result<HashMap<String, f64>> {
    Err(Error::Config("not measured".into()))
}
/// Features.
pub fn cpu_features() -> Vec<String> {
    vec![crate::simd::Cpu::detect().level().name().to_owned()]
}
