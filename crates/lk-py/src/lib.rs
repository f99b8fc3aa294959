//! Python bindings of `lk-core`. No logic lives here.

/// The native module `lvllm._lk`.
#[pyo3::pymodule]
mod _lk {}
