//! The CPU engine of lvllm: routed experts of mixture-of-experts layers, computed where their weights lie.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dtype;
pub mod engine;
pub mod error;
pub mod fault;
pub mod format;
pub mod kernel;
pub mod limits;
pub mod mem;
pub mod moe;
pub mod pool;
pub mod simd;
pub mod stats;
pub mod tile;
pub mod topology;

pub use dtype::Dtype;
pub use error::{Error, Result};
