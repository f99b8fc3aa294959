//! The mixture-of-experts layer, written once for every format, instruction set and activation.
//!
//! A layer computes `y[t] = Σ_j topk_weights[t, j] · expert_{topk_ids[t, j]}(hidden_states[t])` with
//! `expert(x) = W2 · act(W1·x + b1, W3·x + b3) + b2`. Router, shared experts and the factor that some models
//! put on the routed sum belong to the caller.
//!
//! * [`spec`]: what a layer is (shapes, format, activation).
//! * [`shard`]: which node holds which slice of `intermediate_size` of which expert.
//! * [`route`]: `topk_ids` to one list of rows per expert.
//! * `intake`, `weights`: tensors of an expert to packed panels in the nodes' arenas.
//! * `exec`: the job that the workers run: gate/up, activation, down, weighted reduction.
//! * [`layer`]: intake, seal, forward.
//! * [`reference`]: the definition in f64, the oracle of tests.

mod exec;
mod intake;
pub mod layer;
mod operand;
pub mod reference;
pub mod route;
mod scratch;
pub mod shard;
pub mod spec;
pub(crate) mod weights;

pub use intake::TensorView;
pub use layer::{Layer, StepInput};
pub use scratch::Scratch;
pub use spec::LayerSpec;
