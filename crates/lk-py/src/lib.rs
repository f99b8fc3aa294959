//! Python bindings of `lk-core`. No logic lives here.

#[cfg(feature = "cuda")]
mod cuda;
mod engine;
mod error;
mod layer;
mod memory;
mod tensor_ref;

/// The native module `lvllm._lk`.
#[pyo3::pymodule]
mod _lk {
    #[cfg(feature = "cuda")]
    #[pymodule_export]
    use crate::cuda::PyHandover;
    #[pymodule_export]
    use crate::engine::{PyEngine, compute_peaks, cpu_features, read_bandwidth};
    #[pymodule_export]
    use crate::error::{CudaUnavailableError, LkError, UnsupportedFormatError};
    #[pymodule_export]
    use crate::layer::PyLayer;
    #[pymodule_export]
    use crate::memory::{PyLazyBuffer, memory_limits};
    #[pymodule_export]
    use crate::tensor_ref::PyTensorRef;

    /// Version of the native module.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
