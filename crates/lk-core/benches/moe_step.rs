//! The whole MoE layer through the public call: routing, hand-out, barriers and reduction included.
//!
//! `cargo bench --bench moe_step [-- --quick] [--format bf16] [--threads N]`. Each row: tokens, µs (median), GB/s of the
//! distinct experts' bytes, GFLOP/s, the roofline's time from limits measured in the same rounds and the fraction reached;
//! what the values are worth is the business of the layer tests.
#![allow(clippy::print_stdout, reason = "a bench prints")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use lk_core::engine::{Engine, EngineOptions};
use lk_core::format::WeightFormat;
use lk_core::kernel::Activation;
use lk_core::moe::{Layer, LayerSpec, StepInput};
use lk_core::{Dtype, limits};

/// Name, `hidden_size`, `intermediate_size`, `num_experts`, `top_k`.
const SHAPES: [(&str, usize, usize, usize, usize); 3] = [
    ("qwen3-30b-a3b", 2048, 768, 128, 8),
    ("gpt-oss-20b", 2880, 2880, 32, 4),
    ("deepseek-v3, 16 experts held", 7168, 2048, 16, 8),
];

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let quick = args.iter().any(|a| a == "--quick");
    let value = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1)).cloned();
    let threads: Option<usize> = value("--threads").and_then(|t| t.parse().ok());
    let dtype = value("--format").map_or(Dtype::Bf16, |f| Dtype::parse(&f).expect("a dtype name"));
    let options = EngineOptions { threads, isa: std::env::var("LVLLM_ISA").ok(), ..EngineOptions::default() };
    let engine = Engine::new(&options).expect("an engine");
    let threads = engine.plan().num_workers();
    println!("moe_step: {threads} threads, best ISA {}, {} weights", engine.isa_name(), dtype.name());
    for (name, hidden_size, intermediate_size, num_experts, top_k) in
        SHAPES.into_iter().take(if quick { 1 } else { 3 })
    {
        let num_experts = if quick { 16 } else { num_experts };
        let expert_bytes = 3 * hidden_size * intermediate_size * dtype.bytes();
        // Several layers, so that no step finds its experts in a cache.
        let count = if quick { 1 } else { (1usize << 30).div_ceil(num_experts * expert_bytes) };
        let layers: Vec<Arc<Layer>> = (0..count)
            .map(|i| {
                let layer = engine
                    .create_layer(LayerSpec {
                        name: format!("layer {i}"),
                        format: WeightFormat::from_dtype(dtype).expect("a float format"),
                        num_experts,
                        hidden_size,
                        intermediate_size,
                        top_k,
                        dtype: Dtype::Bf16,
                        activation: Activation::SILU,
                        interleaved: false,
                        w13_bias: false,
                        w2_bias: false,
                        router_weight_on_input: false,
                    })
                    .expect("a layer");
                layer.fill_dummy(i as u64).expect("weights");
                layer.seal().expect("all experts");
                layer
            })
            .collect();
        println!(
            "{name}: hidden {hidden_size}, intermediate {intermediate_size}, {num_experts} experts, top-{top_k}"
        );
        println!("{:>7} {:>10} {:>8} {:>9} {:>10} {:>7}", "tokens", "us", "GB/s", "GFLOP/s", "floor us", "%");
        for tokens in if quick { vec![1, 16] } else { vec![1, 4, 16, 64, 256, 1024] } {
            let (mut times, mut reads, mut peaks) = (Vec::new(), Vec::new(), Vec::new());
            let steps: Vec<_> = (0..8).map(|s| step(s, tokens, hidden_size, num_experts, top_k)).collect();
            let distinct = steps.iter().map(|s| s.distinct).sum::<usize>() as f64 / steps.len() as f64;
            let mut out = vec![0u16; tokens * hidden_size];
            let mut at = 0;
            for _ in 0..if quick { 1 } else { 5 } {
                reads.push(limits::read_bandwidth(Some(threads)).expect("a rate"));
                peaks.push(exact_peak(threads));
                let began = Instant::now();
                let mut calls = 0;
                while calls < 3 || began.elapsed() < Duration::from_millis(if quick { 20 } else { 200 }) {
                    let s = &steps[at % steps.len()];
                    let input = StepInput {
                        hidden_states: bytes(&s.x),
                        topk_ids: &s.ids,
                        topk_weights: &s.weights,
                        expert_map: None,
                    };
                    layers[at % count].forward(&input, bytes_mut(&mut out)).expect("a step");
                    at += 1;
                    calls += 1;
                }
                times.push(began.elapsed().as_secs_f64() / f64::from(calls));
            }
            let (time, read, peak) = (median(&mut times), median(&mut reads), median(&mut peaks));
            let moved = distinct * expert_bytes as f64;
            let flops = (6 * tokens * top_k * hidden_size * intermediate_size) as f64;
            let floor = (moved / read / 1e9).max(flops / peak / 1e9);
            println!(
                "{tokens:>7} {:>10.1} {:>8.1} {:>9.0} {:>10.1} {:>7.1}",
                time * 1e6,
                moved / time / 1e9,
                flops / time / 1e9,
                floor * 1e6,
                100.0 * floor / time
            );
        }
    }
}

struct Step {
    x: Vec<u16>,
    ids: Vec<i32>,
    weights: Vec<f32>,
    distinct: usize,
}

/// Uniform routing: `top_k` distinct experts for each token.
fn step(seed: usize, tokens: usize, hidden_size: usize, num_experts: usize, top_k: usize) -> Step {
    let mut state = seed as u64 * 77 + 12_345;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let first = ids.len();
        while ids.len() < first + top_k {
            let id = (next() % num_experts as u64) as i32;
            if !ids[first..].contains(&id) {
                ids.push(id);
            }
        }
    }
    let x = (0..tokens * hidden_size)
        .map(|_| half::bf16::from_f32((next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).to_bits())
        .collect();
    let mut distinct = ids.clone();
    distinct.sort_unstable();
    distinct.dedup();
    Step { x, weights: vec![1.0 / top_k as f32; ids.len()], ids, distinct: distinct.len() }
}

#[expect(unsafe_code, reason = "u16 seen as bytes")]
fn bytes(values: &[u16]) -> &[u8] {
    // SAFETY: every byte pattern is valid and the length is that of the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

#[expect(unsafe_code, reason = "u16 seen as bytes")]
fn bytes_mut(values: &mut [u16]) -> &mut [u8] {
    // SAFETY: as in `bytes`, and the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Best measured peak that exact mode may use: int8 products are not.
fn exact_peak(threads: usize) -> f64 {
    let peaks = limits::compute_peaks(Some(threads)).expect("peaks");
    ["f32fma", "bf16dot", "bf16amx"]
        .iter()
        .filter_map(|family| peaks.get(*family))
        .copied()
        .fold(0.0, f64::max)
}
