//! Random layers with their references, shared by the layer tests.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::struct_excessive_bools,
    reason = "shared by test binaries, each of which uses its part"
)]

use std::sync::Arc;

use half::{bf16, f16};
use lk_core::engine::{Engine, EngineOptions};
use lk_core::format::WeightFormat;
use lk_core::kernel::{Activation, ActivationParams};
use lk_core::moe::reference::ReferenceLayer;
use lk_core::moe::{Layer, LayerSpec, StepInput, TensorView};
use lk_core::topology::{CpuId, NodeId, NodePlan, WorkerPlan, WorkerSlot};
use lk_core::{Dtype, Result};

/// An engine with so many pretended nodes and workers on each; all share the machine's CPUs.
pub fn engine(nodes: usize, workers: usize, isa: Option<&str>) -> Arc<Engine> {
    engine_with(nodes, workers, isa, None)
}

/// The same with one compute family pinned.
pub fn engine_with(nodes: usize, workers: usize, isa: Option<&str>, kernel: Option<&str>) -> Arc<Engine> {
    let cpus: Vec<_> = lk_core::topology::Topology::detect(None)
        .unwrap()
        .nodes
        .iter()
        .flat_map(|n| &n.cores)
        .flat_map(|c| c.cpus.clone())
        .collect::<Vec<CpuId>>();
    let plan = WorkerPlan {
        nodes: (0..nodes)
            .map(|_| NodePlan {
                node: NodeId(0),
                workers: (0..workers).map(|_| WorkerSlot { cpus: cpus.clone() }).collect(),
            })
            .collect(),
        notes: Vec::new(),
    };
    let options = EngineOptions {
        kernel: kernel.map(str::to_owned),
        isa: isa.map(str::to_owned).or_else(|| std::env::var("LVLLM_ISA").ok()),
        ..EngineOptions::default()
    };
    Engine::with_plan(plan, &options).unwrap()
}

/// Deterministic numbers in (-1, 1), a xorshift generator.
pub fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

pub fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        other => panic!("{other} is not a dtype of activations"),
    }
}

pub fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        other => panic!("{other} is not a dtype of activations"),
    }
}

/// One random layer and one step.
#[derive(Debug, Clone)]
pub struct Case {
    pub format: &'static str,
    pub dtype: Dtype,
    pub num_experts: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub top_k: usize,
    pub num_tokens: usize,
    pub activation: &'static str,
    pub gated: bool,
    pub limit: Option<f32>,
    pub interleaved: bool,
    pub bias: bool,
    pub router_weight_on_input: bool,
    /// Matrix, expert, element and value to plant.
    pub poison: Option<(&'static str, usize, usize, f32)>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            format: "bf16",
            dtype: Dtype::Bf16,
            num_experts: 6,
            hidden_size: 128,
            intermediate_size: 256,
            top_k: 2,
            num_tokens: 1,
            activation: "silu",
            gated: true,
            limit: None,
            interleaved: false,
            bias: false,
            router_weight_on_input: false,
            poison: None,
        }
    }
}

impl Case {
    pub fn spec(&self) -> LayerSpec {
        LayerSpec {
            name: "model.layers.0.mlp.experts".to_owned(),
            format: WeightFormat::from_dtype(Dtype::parse(self.format).unwrap()).unwrap(),
            num_experts: self.num_experts,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            top_k: self.top_k,
            dtype: self.dtype,
            activation: Activation::parse(
                &format!("{}{}", self.activation, if self.gated { "" } else { "_no_mul" }),
                ActivationParams { limit: self.limit, ..ActivationParams::default() },
            )
            .unwrap(),
            interleaved: self.interleaved,
            w13_bias: self.bias,
            w2_bias: self.bias,
            router_weight_on_input: self.router_weight_on_input,
        }
    }

    pub fn build(&self, engine: &Engine) -> Result<(Arc<Layer>, ReferenceLayer)> {
        let spec = self.spec();
        let dtype = Dtype::parse(self.format).unwrap();
        let layer = engine.create_layer(spec.clone())?;
        let (h, i) = (self.hidden_size, self.intermediate_size);
        let rows = spec.w13_shards() * i;
        let mut reference = ReferenceLayer {
            hidden_size: h,
            intermediate_size: i,
            activation: spec.activation,
            interleaved: self.interleaved,
            router_weight_on_input: self.router_weight_on_input,
            w13: Vec::new(),
            w2: Vec::new(),
            w13_bias: Vec::new(),
            w2_bias: Vec::new(),
        };
        for e in 0..self.num_experts {
            let seed = 17 * e as u64;
            let scaled = |seed: u64, len: usize, gain: f32| -> Vec<f32> {
                random(seed, len).into_iter().map(|v| v * gain).collect()
            };
            let mut w13 = scaled(seed + 1, rows * h, 3.0 / (h as f32).sqrt());
            let mut w2 = scaled(seed + 2, h * i, 3.0 / (i as f32).sqrt());
            if let Some((matrix, expert, at, value)) = self.poison
                && expert == e
            {
                if matrix == "w13_weight" { w13[at] = value } else { w2[at] = value }
            }
            let (w13, w2) = (encode(dtype, &w13), encode(dtype, &w2));
            let (b13, b2) = (encode(dtype, &random(seed + 3, rows)), encode(dtype, &random(seed + 4, h)));
            let (s13, s2, sb13, sb2) = ([rows, h], [h, i], [rows], [h]);
            let mut tensors = vec![
                ("w13_weight", TensorView { dtype, shape: &s13, bytes: &w13 }),
                ("w2_weight", TensorView { dtype, shape: &s2, bytes: &w2 }),
            ];
            if self.bias {
                tensors.push(("w13_bias", TensorView { dtype, shape: &sb13, bytes: &b13 }));
                tensors.push(("w2_bias", TensorView { dtype, shape: &sb2, bytes: &b2 }));
                reference.w13_bias.push(decode(dtype, &b13));
                reference.w2_bias.push(decode(dtype, &b2));
            }
            layer.load_expert(e, &tensors)?;
            reference.w13.push(decode(dtype, &w13));
            reference.w2.push(decode(dtype, &w2));
        }
        layer.seal()?;
        Ok((layer, reference))
    }

    pub fn hidden_states(&self) -> Vec<u8> {
        encode(self.dtype, &random(99, self.num_tokens * self.hidden_size))
    }

    pub fn decode(&self, bytes: &[u8]) -> Vec<f32> {
        decode(self.dtype, bytes)
    }

    /// Distinct experts for each token, as routers choose them, and weights that sum to one.
    pub fn routing(&self) -> (Vec<i32>, Vec<f32>) {
        let mut ids = Vec::new();
        for t in 0..self.num_tokens {
            ids.extend((0..self.top_k).map(|j| ((t * 7 + j * (t % 3 + 1)) % self.num_experts) as i32));
        }
        let weights =
            random(7, ids.len()).into_iter().map(|w| (w + 1.5) / (2.0 * self.top_k as f32)).collect();
        (ids, weights)
    }

    pub fn run(&self, engine: &Engine) -> Result<Vec<u8>> {
        let (layer, _) = self.build(engine)?;
        let (x, (ids, weights)) = (self.hidden_states(), self.routing());
        let mut out = vec![0xffu8; x.len()];
        let input = StepInput { hidden_states: &x, topk_ids: &ids, topk_weights: &weights, expert_map: None };
        layer.forward(&input, &mut out)?;
        Ok(out)
    }

    /// Asserts that `out` is the reference within what rounding of operands and output allows.
    pub fn compare(&self, out: &[u8], expected: &[f64]) {
        let largest = expected.iter().fold(1e-6f64, |m, v| m.max(v.abs()));
        let bound = match self.dtype {
            // bf16 operands of the second product and the rounding of the output.
            Dtype::Bf16 => 1.0 / 128.0,
            Dtype::F16 => 1.0 / 1024.0,
            _ => 2e-5,
        };
        for (at, (&got, &want)) in decode(self.dtype, out).iter().zip(expected).enumerate() {
            let error = (f64::from(got) - want).abs() / largest;
            assert!(error <= bound, "{self:?}: element {at} is {got}, expected {want}, relative {error:.2e}");
        }
    }
}

/// Builds, runs and compares one case.
pub fn check(engine: &Engine, case: &Case) {
    let (_, reference) = case.build(engine).unwrap();
    let (ids, weights) = case.routing();
    let expected = reference.forward(&case.decode(&case.hidden_states()), &ids, &weights, case.top_k);
    case.compare(&case.run(engine).unwrap(), &expected);
}
