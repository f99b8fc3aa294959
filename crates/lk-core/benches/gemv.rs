//! Few rows: weights stream from memory once, and the read bandwidth of the same run is the limit.
//!
//! `cargo bench --bench gemv -- [--quick] [--threads N] [--format NAME] [--kernel PREFIX] [--rows M] [--hot]`: one row per
//! format, kernel and number of rows. GB/s count packed bytes, scales included. `--hot` keeps the panels in the second-level cache instead.
#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs, reason = "a bench")]

#[path = "../tests/kernels/support.rs"]
mod support;

use lk_core::Dtype;
use lk_core::format::WeightFormat;
use lk_core::kernel::{Kernel, KernelSet, Operand, Rows};
use lk_core::limits;
use lk_core::simd::Cpu;
use lk_core::tile::{NR, TileLayout};
use std::time::Duration;

struct Options {
    quick: bool,
    hot: bool,
    threads: Option<usize>,
    format: Option<String>,
    kernel: Option<String>,
    rows: Option<usize>,
}

/// GB/s of packed weights and the time of one pass, best of the rounds.
fn rate(
    kernel: &Kernel,
    layout: &TileLayout,
    m: usize,
    options: &Options,
    threads: usize,
) -> (f64, Duration) {
    let total = if options.hot {
        threads * (768 << 10)
    } else if options.quick {
        64 << 20
    } else {
        1 << 30
    };
    let panels = (total / threads / layout.panel_bytes()).max(1);
    let repeat = if options.hot { 200 } else { 1 };
    let rounds = limits::together(
        Some(threads),
        |i| {
            let one = TileLayout::slice_of(layout.format(), NR, layout.k(), 0, 0, layout.k()).unwrap();
            let panel = support::random_packed(&one, i as u64 + 1);
            let mut weights = limits::huge_vec(panels * panel.len(), 0u8).unwrap();
            for place in weights.chunks_exact_mut(panel.len()) {
                place.copy_from_slice(&panel);
            }
            let x = vec![0.25f32; m * stride(layout)];
            let xb = vec![0x3e80u16; m * stride(layout)];
            (weights, x, xb, vec![0f32; m * NR])
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
            weights.len() * repeat
        },
        if options.quick { 2 } else { 4 },
    )
    .unwrap();
    let best = rounds.iter().map(|r| r.1).min().unwrap();
    let bytes: usize = rounds[0].0.iter().sum();
    (bytes as f64 / best.as_secs_f64() / 1e9, best)
}

/// Elements from row to row: not a power of two, which would put all rows of a tile into one set of a cache.
fn stride(layout: &TileLayout) -> usize {
    layout.k_padded() + 32
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let value =
        |name: &str| arguments.iter().position(|a| a == name).and_then(|i| arguments.get(i + 1)).cloned();
    let options = Options {
        quick: arguments.iter().any(|a| a == "--quick"),
        hot: arguments.iter().any(|a| a == "--hot"),
        threads: value("--threads").and_then(|t| t.parse().ok()),
        format: value("--format"),
        kernel: value("--kernel"),
        rows: value("--rows").and_then(|m| m.parse().ok()),
    };
    let threads = options.threads.unwrap_or_else(|| limits::allowed_cpus().len());
    let cpu = Cpu::detect();
    println!("cpu: {cpu}; {threads} threads; K = 2048");
    let read = || {
        limits::read_bandwidth_over(Some(threads), if options.quick { 64 << 20 } else { 1 << 30 }, 4).unwrap()
    };
    println!(
        "{:34} {:20} {:>3} {:>9} {:>11} {:>9} {:>6}",
        "kernel", "format", "m", "GB/s", "us", "read_bw", "share"
    );
    for format in support::formats() {
        if options.format.as_ref().is_some_and(|f| *f != format.to_string()) {
            continue;
        }
        if options.quick && ![WeightFormat::BF16, WeightFormat::MXFP4].contains(&format) {
            continue;
        }
        let layout = TileLayout::slice_of(format, NR, 2048, 0, 0, 2048).unwrap();
        let limit = read();
        let set = KernelSet::build(format, cpu, Dtype::Bf16).unwrap();
        for kernel in set.kernels() {
            if options.kernel.as_ref().is_some_and(|k| !kernel.name().starts_with(k.as_str())) {
                continue;
            }
            for m in options.rows.map_or_else(|| vec![1, 2, 4, 8, 16], |m| vec![m]) {
                let (rate, time) = rate(kernel, &layout, m, &options, threads);
                println!(
                    "{:34} {:20} {m:>3} {rate:>9.1} {:>11.0} {limit:>9.1} {:>5.0}%",
                    kernel.name(),
                    format.to_string(),
                    time.as_secs_f64() * 1e6,
                    100.0 * rate / limit
                );
            }
        }
    }
}
