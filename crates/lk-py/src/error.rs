//! `lk_core::Error` as Python exceptions.

use pyo3::create_exception;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

create_exception!(lvllm._lk, LkError, PyRuntimeError, "An error of the native engine.");
create_exception!(
    lvllm._lk,
    UnsupportedFormatError,
    LkError,
    "A weight format that the engine does not compute."
);

create_exception!(lvllm._lk, CudaUnavailableError, LkError, "No usable NVIDIA driver, device or NVRTC.");

/// Bridges the orphan rule between `lk_core::Error` and `PyErr`.
pub(crate) struct PyLkError(lk_core::Error);

pub(crate) type PyLkResult<T> = Result<T, PyLkError>;

impl From<lk_core::Error> for PyLkError {
    fn from(error: lk_core::Error) -> Self {
        Self(error)
    }
}

impl From<PyLkError> for PyErr {
    fn from(PyLkError(error): PyLkError) -> Self {
        use lk_core::Error as E;
        let text = error.to_string();
        match error {
            E::UnsupportedFormat(_) => UnsupportedFormatError::new_err(text),
            E::Config(_) | E::Argument(_) | E::Shape(_) => PyValueError::new_err(text),
            E::CudaUnavailable(_) => CudaUnavailableError::new_err(text),
            _ => LkError::new_err(text),
        }
    }
}
