//! Many rows: arithmetic, held against the measured peak of the kernel's own kind of product.
//!
//! `cargo bench --bench gemm -- [--quick] [--threads N] [--format NAME]`: one row per format, kernel and number of rows.
#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs, reason = "a bench")]

#[path = "../tests/kernels/support.rs"]
mod support;

use lk_core::Dtype;
use lk_core::format::WeightFormat;
use lk_core::kernel::{Kernel, KernelSet, Operand, Rows};
use lk_core::limits;
use lk_core::simd::Cpu;
use lk_core::tile::{NR, TileLayout};

/// GFLOP/s over 24 panels (one expert's gate, of 768 channels), best of the rounds.
fn rate(kernel: &Kernel, layout: &TileLayout, m: usize, quick: bool, threads: usize) -> (f64, f64) {
    const PANELS: usize = 24;
    let repeat = (if quick { 64 } else { 1024 } / m).max(1);
    let rounds = limits::together(
        Some(threads),
        |i| {
            let matrix =
                TileLayout::slice_of(layout.format(), NR * PANELS, layout.k(), 0, 0, layout.k()).unwrap();
            let weights = support::random_packed(&matrix, i as u64 + 1);
            (
                weights,
                vec![0.25f32; m * stride(layout)],
                vec![0x3e80u16; m * stride(layout)],
                vec![0f32; m * NR],
            )
        },
        |(weights, x, xb, out)| {
            let rows = match kernel.operand() {
                Operand::F32 => Rows::f32(x, layout.k_padded(), stride(layout)),
                Operand::Bf16 => Rows::bf16(xb, layout.k_padded(), stride(layout)),
            };
            for _ in 0..repeat {
                for panel in weights.chunks_exact(layout.panel_bytes()) {
                    kernel.run(panel, layout, &rows, out);
                }
            }
        },
        if quick { 2 } else { 4 },
    )
    .unwrap();
    let best = rounds.iter().map(|r| r.1).min().unwrap().as_secs_f64();
    let flops = 2.0 * (m * NR * PANELS * layout.k() * threads * repeat) as f64;
    (flops / best / 1e9, best * 1e6 / repeat as f64)
}

/// Elements from row to row: not a power of two, which would put all rows of a tile into one set of a cache.
fn stride(layout: &TileLayout) -> usize {
    layout.k_padded() + 32
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let value =
        |name: &str| arguments.iter().position(|a| a == name).and_then(|i| arguments.get(i + 1)).cloned();
    let quick = arguments.iter().any(|a| a == "--quick");
    let only = value("--format");
    let threads =
        value("--threads").and_then(|t| t.parse().ok()).unwrap_or_else(|| limits::allowed_cpus().len());
    let cpu = Cpu::detect();
    println!("cpu: {cpu}; {threads} threads; [768, 2048]");
    println!(
        "{:34} {:20} {:>4} {:>9} {:>11} {:>9} {:>6}",
        "kernel", "format", "m", "GFLOP/s", "us", "peak", "share"
    );
    for format in support::formats() {
        if only.as_ref().is_some_and(|f| *f != format.to_string())
            || quick && ![WeightFormat::BF16, WeightFormat::MXFP4].contains(&format)
        {
            continue;
        }
        let layout = TileLayout::slice_of(format, NR, 2048, 0, 0, 2048).unwrap();
        let peaks = limits::compute_peaks(Some(threads)).unwrap();
        for kernel in KernelSet::build(format, cpu, Dtype::Bf16).unwrap().kernels() {
            for m in [4, 8, 16, 32, 64, 256, 512] {
                let peak = peaks.get(kernel.family().name()).copied().unwrap_or(f64::NAN);
                let (rate, us) = rate(kernel, &layout, m, quick, threads);
                println!(
                    "{:34} {:20} {m:>4} {rate:>9.1} {us:>11.0} {peak:>9.1} {:>5.0}%",
                    kernel.name(),
                    format.to_string(),
                    100.0 * rate / peak
                );
            }
        }
    }
}
