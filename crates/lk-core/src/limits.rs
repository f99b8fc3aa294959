//! Limits of the machine, measured: what reports and kernels are held against.

pub use crate::kernel::limits::{
    allowed_cpus, huge_vec, pin_to, read_bandwidth, read_bandwidth_over, together,
};

use crate::Result;
use crate::kernel::limits;
use crate::simd::Cpu;
use std::collections::HashMap;

/// Arithmetic peaks in GFLOP/s (GOP/s for int8) by kernel family, `threads` threads at once (default: all allowed CPUs).
///
/// # Errors
///
/// If a thread cannot be started.
pub fn compute_peaks(threads: Option<usize>) -> Result<HashMap<String, f64>> {
    Ok(limits::peaks(threads, Cpu::detect())?
        .into_iter()
        .map(|(name, rate)| (name.to_owned(), rate))
        .collect())
}

/// Names of the instruction-set extensions that kernels may use here, poorest first; `scalar` alone if there are none.
pub fn cpu_features() -> Vec<String> {
    Cpu::detect().to_string().split(' ').map(str::to_owned).collect()
}
