//! The one error type of the crate. Messages name the layer, the format, the numbers and a way out.

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong in the engine, by kind; the text carries the numbers.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The machine's topology could not be read, or leaves no CPU to work on.
    #[error("topology: {0}")]
    Topology(String),
    /// A setting is malformed or out of range; names the setting, the value and what is allowed.
    #[error("{0}")]
    Config(String),
    /// The weight format (or an option of it) is not one that the engine computes.
    #[error("unsupported format: {0}")]
    UnsupportedFormat(String),
    /// Shapes, dtypes or group sizes that do not fit together.
    #[error("shape: {0}")]
    Shape(String),
    /// A part of a layer that was declared was never loaded.
    #[error("missing weights: {0}")]
    Missing(String),
    /// Weights or scales that cannot be right (NaN, infinity, reserved codes).
    #[error("corrupt weights: {0}")]
    Corrupt(String),
    /// Memory could not be had.
    #[error("out of host memory on node {node}: {bytes} bytes wanted: {detail}")]
    OutOfMemory {
        /// NUMA node on which the memory was wanted.
        node: u32,
        /// Size of the failed request.
        bytes: usize,
        /// What the system said and one way out.
        detail: String,
    },
    /// The forced instruction set is not one of this CPU.
    #[error("{0}")]
    UnsupportedIsa(String),
    /// A worker panicked; the pool refuses all further work.
    #[error("worker {worker} failed: {message}")]
    Poisoned {
        /// Index of the worker that panicked first.
        worker: usize,
        /// The panic's message.
        message: String,
    },
    /// The engine was used in a child process that was forked after the engine's start.
    #[error("{0}")]
    Forked(String),
    /// No progress was made within the allowed time.
    #[error("timeout: {0}")]
    Timeout(String),
    /// There is no usable NVIDIA driver, device or run-time compiler.
    #[error("CUDA is not available: {0}")]
    CudaUnavailable(String),
    /// A call of the CUDA driver failed.
    #[error("{call}: {name} ({code}): {detail}")]
    Cuda {
        /// Name of the driver's function.
        call: &'static str,
        /// Name of the error.
        name: String,
        /// Its number.
        code: u32,
        /// The driver's text, and a way out where there is one.
        detail: String,
    },
    /// The GPU kernels did not compile; holds the compiler's log.
    #[error("NVRTC: {0}")]
    Nvrtc(String),
    /// The hand-over between GPU and engine failed; it is of no further use.
    #[error("{0}")]
    Handover(String),
    /// An argument of a call is out of range (an expert id, a row count).
    #[error("{0}")]
    Argument(String),
}
