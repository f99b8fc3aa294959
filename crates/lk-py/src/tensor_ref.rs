//! A tensor as pointer, size, dtype and shape; the Python side keeps the memory alive.
#![expect(unsafe_code, reason = "turns an address that Python vouches for into a slice")]

use lk_core::Dtype;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A contiguous CPU tensor: address, bytes, dtype name and shape. `owner` is kept alive with it.
#[pyclass(frozen, name = "TensorRef", module = "lvllm._lk")]
pub(crate) struct PyTensorRef {
    data_ptr: usize,
    nbytes: usize,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    _owner: Option<Py<PyAny>>,
}

#[pymethods]
impl PyTensorRef {
    /// Raises ValueError when dtype and shape do not make `nbytes`, or the address is null or misaligned.
    #[new]
    #[pyo3(signature = (data_ptr, nbytes, dtype, shape, owner = None))]
    fn new(
        data_ptr: usize,
        nbytes: usize,
        dtype: &str,
        shape: Vec<usize>,
        owner: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let parsed = Dtype::parse(dtype).ok_or_else(|| {
            PyValueError::new_err(format!("dtype {dtype} is not one that the engine knows"))
        })?;
        let expected = shape.iter().try_fold(parsed.bytes(), |n, &d| n.checked_mul(d));
        if expected != Some(nbytes) {
            return Err(PyValueError::new_err(format!("{dtype} of shape {shape:?} is not {nbytes} bytes")));
        }
        if nbytes > 0 && (data_ptr == 0 || !data_ptr.is_multiple_of(parsed.bytes())) {
            return Err(PyValueError::new_err(format!(
                "address {data_ptr:#x} is null or not aligned to {} bytes",
                parsed.bytes()
            )));
        }
        if nbytes > isize::MAX as usize {
            return Err(PyValueError::new_err(format!("{nbytes} bytes exceed the address space")));
        }
        Ok(Self { data_ptr, nbytes, dtype: parsed, shape, _owner: owner })
    }

    /// Shape of the tensor.
    #[getter]
    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    /// Name of the dtype.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }
}

impl PyTensorRef {
    /// The tensor's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.nbytes == 0 {
            return &[];
        }
        // SAFETY: the Python caller vouches that `nbytes` at `data_ptr` stay readable while the object (and the
        // owner it holds) lives; null was refused in `new`.
        unsafe { std::slice::from_raw_parts(self.data_ptr as *const u8, self.nbytes) }
    }

    /// The tensor's bytes for writing.
    ///
    /// # Safety
    /// No other reference to this memory is in use until the returned one is dropped.
    #[expect(clippy::mut_from_ref, reason = "exclusiveness is the caller's contract")]
    pub(crate) unsafe fn bytes_mut(&self) -> &mut [u8] {
        if self.nbytes == 0 {
            return &mut [];
        }
        // SAFETY: as in `bytes`; exclusive by the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.data_ptr as *mut u8, self.nbytes) }
    }

    /// The tensor as 32-bit integers, checked for dtype.
    pub(crate) fn as_i32(&self, name: &str) -> PyResult<&[i32]> {
        self.expect(Dtype::I32, name)?;
        if self.nbytes == 0 {
            return Ok(&[]);
        }
        // SAFETY: i32 has no invalid values; alignment and size were checked in `new`.
        Ok(unsafe { std::slice::from_raw_parts(self.bytes().as_ptr().cast(), self.nbytes / 4) })
    }

    /// The tensor as f32, checked for dtype.
    pub(crate) fn as_f32(&self, name: &str) -> PyResult<&[f32]> {
        self.expect(Dtype::F32, name)?;
        if self.nbytes == 0 {
            return Ok(&[]);
        }
        // SAFETY: f32 has no invalid values; alignment and size were checked in `new`.
        Ok(unsafe { std::slice::from_raw_parts(self.bytes().as_ptr().cast(), self.nbytes / 4) })
    }

    fn expect(&self, dtype: Dtype, name: &str) -> PyResult<()> {
        if self.dtype == dtype {
            return Ok(());
        }
        Err(PyValueError::new_err(format!("{name} must be {dtype}, not {}", self.dtype)))
    }
}
