//! Intake, seal and forward of one layer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::engine::Shared as EngineShared;
use crate::kernel::{Family, KernelSet, Operand};
use crate::mem::{LocalityReport, NodeArena, locality};
use crate::stats::LayerStats;
use crate::{Error, Result};

use super::exec::{Step, XRows};
use super::intake::{TensorView, pack_expert};
use super::operand::{Request, prepare};
use super::route::Routing;
use super::scratch::{Buffers, MAX_STEP_TOKENS, Scratch, Shared};
use super::shard::ShardRule;
use super::spec::LayerSpec;
use super::weights::{NodeWeights, Weights};

/// Inputs of one forward call.
#[derive(Debug, Clone, Copy)]
pub struct StepInput<'a> {
    /// `[T, hidden_size]` in the layer's dtype.
    pub hidden_states: &'a [u8],
    /// `[T, top_k]`; -1 marks padding.
    pub topk_ids: &'a [i32],
    /// `[T, top_k]`.
    pub topk_weights: &'a [f32],
    /// Global to local expert id, -1 = held elsewhere; without it ids are local.
    pub expert_map: Option<&'a [i32]>,
}

/// One MoE layer: its packed experts and the engine that computes them.
pub struct Layer {
    spec: LayerSpec,
    engine: Arc<EngineShared>,
    weights: Weights,
    rule: ShardRule,
    loaded: Mutex<Vec<bool>>,
    sealed: AtomicBool,
    stats: LayerStats,
}

impl Layer {
    /// Plans the layer and maps its arenas; no page is touched yet.
    pub(crate) fn new(spec: LayerSpec, engine: Arc<EngineShared>) -> Result<Self> {
        spec.validate()?;
        let plan = engine.plan();
        let rule = ShardRule::new(spec.intermediate_size, spec.k_group(), plan.nodes.len());
        let mut nodes = Vec::new();
        for (index, node) in plan.nodes.iter().enumerate() {
            let (slices, slots, bytes) = NodeWeights::plan(&spec, &rule, index)?;
            let arena = NodeArena::new(node.node, bytes.max(1), engine.binder())?;
            nodes.push(NodeWeights::new(arena, slices, slots));
        }
        let (gate_up, down) = engine.kernels(&spec, &nodes)?;
        let weights = Weights {
            hidden_size: spec.hidden_size,
            activation: spec.activation,
            weight_on_input: spec.router_weight_on_input,
            gate_up,
            down,
            nodes,
        };
        let loaded = Mutex::new(vec![false; spec.num_experts]);
        Ok(Self {
            spec,
            engine,
            weights,
            rule,
            loaded,
            sealed: AtomicBool::new(false),
            stats: LayerStats::default(),
        })
    }

    /// What the layer is.
    pub fn spec(&self) -> &LayerSpec {
        &self.spec
    }

    /// Packs one expert into the arenas with all workers.
    ///
    /// `tensors` bear vLLM's parameter names without the leading expert dimension: `w13_weight`
    /// `[w13_shards · intermediate_size, hidden_size]` (gate rows, then up rows, or alternating), `w2_weight`
    /// `[hidden_size, intermediate_size]`, `w13_bias`, `w2_bias`, and the scales of the format.
    ///
    /// # Errors
    /// Names layer, expert and tensor: wrong shape or dtype, a tensor missing, NaN or infinite values.
    pub fn load_expert(&self, expert: usize, tensors: &[(&str, TensorView<'_>)]) -> Result<()> {
        if expert >= self.spec.num_experts {
            return Err(Error::Argument(format!(
                "{}: expert {expert} is not in 0..{}",
                self.spec.name, self.spec.num_experts
            )));
        }
        if self.sealed.load(Ordering::Acquire) {
            return Err(Error::Argument(format!(
                "{}: expert {expert} arrives after the layer was sealed: reset the layer to load it anew",
                self.spec.name
            )));
        }
        // One intake at a time, and none beside a step.
        let _running = self.engine.lock_scratch()?;
        pack_expert(&self.spec, &self.rule, &self.weights.nodes, expert, tensors, self.engine.pool())?;
        self.lock_loaded()[expert] = true;
        Ok(())
    }

    /// Fills every expert with valid pseudo-random weights.
    ///
    /// # Errors
    /// As [`Layer::load_expert`].
    pub fn fill_dummy(&self, seed: u64) -> Result<()> {
        let tensors = super::intake::dummy_expert(&self.spec, seed)?;
        let views: Vec<_> = tensors.iter().map(|(name, t)| (*name, t.view())).collect();
        for expert in super::intake::templates(&self.weights.nodes) {
            self.load_expert(expert, &views)?;
        }
        let _running = self.engine.lock_scratch()?;
        super::intake::replicate(&self.weights.nodes, self.spec.num_experts, self.engine.pool())?;
        self.lock_loaded().fill(true);
        Ok(())
    }

    /// Ends intake.
    ///
    /// # Errors
    /// [`Error::Missing`] names the experts that were never loaded.
    pub fn seal(&self) -> Result<()> {
        let loaded = self.lock_loaded();
        let missing: Vec<_> = loaded.iter().enumerate().filter(|(_, l)| !**l).map(|(e, _)| e).collect();
        if !missing.is_empty() {
            let shown: Vec<_> = missing.iter().take(8).map(ToString::to_string).collect();
            return Err(Error::Missing(format!(
                "{}: {} of {} experts were never loaded ({}{}): the checkpoint lacks their tensors",
                self.spec.name,
                missing.len(),
                loaded.len(),
                shown.join(", "),
                if missing.len() > shown.len() { ", …" } else { "" }
            )));
        }
        self.sealed.store(true, Ordering::Release);
        Ok(())
    }

    /// Opens the layer for a new intake of all experts.
    pub fn reset(&self) {
        self.sealed.store(false, Ordering::Release);
        self.lock_loaded().fill(false);
    }

    /// Computes `output[t] = Σ_j topk_weights[t, j] · expert_{topk_ids[t, j]}(hidden_states[t])`.
    ///
    /// `output` is `[T, hidden_size]` in the layer's dtype; accumulation is f32 with one rounding at the end. The
    /// caller's thread is worker 0. Calls from several threads are served one after another.
    ///
    /// # Errors
    /// Wrong sizes, ids out of range, a layer that is not sealed, a worker that failed.
    pub fn forward(&self, input: &StepInput<'_>, output: &mut [u8]) -> Result<()> {
        let spec = &self.spec;
        if !self.sealed.load(Ordering::Acquire) {
            return Err(Error::Missing(format!("{}: forward before the layer was sealed", spec.name)));
        }
        let row_bytes = spec.hidden_size * spec.dtype.bytes();
        let num_tokens = input.hidden_states.len() / row_bytes;
        let sizes_fit = input.hidden_states.len() == num_tokens * row_bytes
            && output.len() == input.hidden_states.len()
            && input.topk_ids.len() == num_tokens * spec.top_k
            && input.topk_weights.len() == input.topk_ids.len();
        if !sizes_fit {
            return Err(Error::Shape(format!(
                "{}: hidden_states of {} bytes, output of {}, {} topk_ids and {} topk_weights do not fit \
                 hidden_size {}, top_k {}, dtype {}",
                spec.name,
                input.hidden_states.len(),
                output.len(),
                input.topk_ids.len(),
                input.topk_weights.len(),
                spec.hidden_size,
                spec.top_k,
                spec.dtype
            )));
        }
        if !output.as_ptr().addr().is_multiple_of(spec.dtype.bytes()) {
            return Err(Error::Argument(format!("{}: output is not aligned to its elements", spec.name)));
        }
        let started = Instant::now();
        let mut scratch = self.engine.lock_scratch()?;
        let mut pairs = 0;
        for first in (0..num_tokens).step_by(MAX_STEP_TOKENS) {
            let tokens = first..num_tokens.min(first + MAX_STEP_TOKENS);
            let part = StepInput {
                hidden_states: &input.hidden_states[tokens.start * row_bytes..tokens.end * row_bytes],
                topk_ids: &input.topk_ids[tokens.start * spec.top_k..tokens.end * spec.top_k],
                topk_weights: &input.topk_weights[tokens.start * spec.top_k..tokens.end * spec.top_k],
                expert_map: input.expert_map,
            };
            let out = &mut output[tokens.start * row_bytes..tokens.end * row_bytes];
            pairs += self.step(&part, tokens.len(), out, &mut scratch)?;
        }
        drop(scratch);
        self.stats.record(num_tokens, pairs, started.elapsed());
        Ok(())
    }

    fn step(
        &self,
        input: &StepInput<'_>,
        num_tokens: usize,
        out: &mut [u8],
        scratch: &mut Scratch,
    ) -> Result<usize> {
        let spec = &self.spec;
        scratch.routing.build(
            input.topk_ids,
            input.topk_weights,
            spec.top_k,
            spec.num_experts,
            input.expert_map,
        )?;
        let pairs = scratch.routing.num_pairs();
        if pairs == 0 {
            out.fill(0);
            return Ok(0);
        }
        scratch.prepare(&self.weights, num_tokens);
        // The converted rows are written before the job and only read in it, like everything else of the scratch but
        // its shared parts.
        let mut operands = std::mem::take(&mut scratch.operands);
        let (x_f32, x_bf16) =
            self.operands(input.hidden_states, num_tokens, &mut operands, &scratch.routing)?;
        let step = Step {
            weights: &self.weights,
            ops: self.engine.ops(),
            routing: &scratch.routing,
            num_tokens,
            x_f32,
            x_bf16,
            scratch,
            out: Shared::new(out),
            dtype: spec.dtype,
        };
        let done = self.engine.run(&|worker| step.run(worker));
        scratch.operands = operands;
        done.map(|()| pairs)
    }

    /// Rows of `hidden_states` in every operand type that the step's kernels want; as they lie where that will do.
    fn operands<'a>(
        &'a self,
        hidden_states: &'a [u8],
        num_tokens: usize,
        buffers: &'a mut Buffers,
        routing: &Routing,
    ) -> Result<(Option<XRows<'a>>, Option<XRows<'a>>)> {
        let (mut want_f32, mut want_bf16, mut gather) = (false, false, false);
        for active in &routing.active {
            let kernel = self.weights.gate_up.select(active.len as usize);
            match kernel.operand() {
                Operand::Bf16 => want_bf16 = true,
                Operand::F32 => want_f32 = true,
            }
            gather |= kernel.family() == Family::Bf16Amx;
        }
        let request = Request {
            spec: &self.spec,
            ops: self.engine.ops(),
            hidden_states,
            num_tokens,
            k_padded: self.weights.k_padded(),
            gather,
        };
        prepare(&request, (want_f32, want_bf16), buffers, routing, |job| self.engine.run(job))
    }

    /// Bytes of packed experts on each node of the plan.
    pub fn bytes_per_node(&self) -> Vec<usize> {
        self.weights.nodes.iter().map(|n| n.arena.len()).collect()
    }

    /// Where a sample of the packed pages lies, by node of the plan.
    pub fn locality(&self) -> LocalityReport {
        let arenas = self.weights.nodes.iter().map(|n| (n.arena.node(), n.bytes()));
        locality(self.engine.binder(), arenas)
    }

    /// Kernel names by matrix (`w13`, `w2`) and rows per expert (`1` … `16`, `many`).
    pub fn kernel_names(&self) -> BTreeMap<&'static str, Vec<(String, String)>> {
        let table = |set: &KernelSet| {
            let rows = (1..=16).map(|m| (m.to_string(), m)).chain([("many".to_owned(), usize::MAX)]);
            rows.map(|(name, m)| (name, set.select(m).name().to_owned())).collect()
        };
        [("w13", table(&self.weights.gate_up)), ("w2", table(&self.weights.down))].into()
    }

    /// Counters of this layer.
    pub fn stats(&self) -> &LayerStats {
        &self.stats
    }

    fn lock_loaded(&self) -> std::sync::MutexGuard<'_, Vec<bool>> {
        self.loaded.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
