//! The calls of the CUDA driver that we use, on raw handles, with results.
//!
//! Everything happens in the device's primary context, the one that torch uses, so its streams and memory are ours
//! to use. Nothing here panics where there is no driver: [`Device::open`] asks first.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};

use cudarc::driver::sys;

use crate::{Error, Result};

/// A stream as torch hands it out (`torch.cuda.Stream.cuda_stream`); 0 is the legacy default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(pub usize);

/// Address of device memory, or of host memory that the device sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    pub(super) fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// Turns a status into an error that names the call.
pub(super) fn check(call: &'static str, status: sys::CUresult) -> Result<()> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let text = |get: unsafe fn(sys::CUresult, *mut *const std::ffi::c_char) -> sys::CUresult| {
        let mut text = null();
        // SAFETY: the driver stores a pointer to a static string, or null for a status that it does not know.
        let known = unsafe { get(status, &raw mut text) } == sys::CUresult::CUDA_SUCCESS && !text.is_null();
        if !known {
            return "unknown".to_owned();
        }
        // SAFETY: a static string of the driver, as above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(Error::Cuda {
        call,
        name: text(sys::cuGetErrorName),
        code: status as u32,
        detail: text(sys::cuGetErrorString),
    })
}

/// One GPU and its primary context.
#[derive(Debug)]
pub struct Device {
    handle: sys::CUdevice,
    context: sys::CUcontext,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
}

// SAFETY: driver handles may be used from any thread; the context is made current for each use.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device by its number in this process (`CUDA_VISIBLE_DEVICES` applies).
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`] without driver or device, [`Error::Cuda`] for other refusals.
    pub fn open(ordinal: u32) -> Result<Self> {
        // SAFETY: only tries to load the driver library.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::CudaUnavailable(
                "the driver library libcuda.so.1 cannot be loaded: install an NVIDIA driver, or give the container \
                 access to it"
                    .to_owned(),
            ));
        }
        // SAFETY: the library is there; initialising twice is allowed.
        check("cuInit", unsafe { sys::cuInit(0) })
            .map_err(|error| Error::CudaUnavailable(error.to_string()))?;
        let mut handle = 0;
        // SAFETY: the driver is initialised; the result is written through the pointer.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut handle, ordinal as c_int) })
            .map_err(|error| Error::CudaUnavailable(format!("device {ordinal}: {error}")))?;
        let mut context = null_mut();
        // SAFETY: the device exists; the reference taken here is given back at drop.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, handle)
        })?;
        let mut device = Self { handle, context, capability: (0, 0) };
        device.capability = (
            device.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
            device.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
        );
        Ok(device)
    }

    fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: a valid device; the result is written through the pointer.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&raw mut value, attribute, self.handle)
        })?;
        Ok(value)
    }

    /// Number of multiprocessors.
    pub fn multiprocessors(&self) -> Result<u32> {
        let count = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(count.max(1) as u32)
    }

    /// Makes the context current on this thread until the guard is dropped; nothing to do where torch has it current.
    pub(super) fn enter(&self) -> Result<Entered> {
        let mut current = null_mut();
        // SAFETY: the result is written through the pointer.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut current) })?;
        if current == self.context {
            return Ok(Entered { pushed: false });
        }
        // SAFETY: the context is retained.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        Ok(Entered { pushed: true })
    }

    /// Loads a module and its functions.
    pub(super) fn load<const N: usize>(
        &self,
        image: &[u8],
        names: [&str; N],
    ) -> Result<(Module, [Function; N])> {
        let _entered = self.enter()?;
        let mut handle = null_mut();
        // SAFETY: the image is a cubin, or PTX that ends with 0; the driver copies it.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut handle, image.as_ptr().cast()) })?;
        let module = Module(handle);
        let mut functions = [Function(null_mut()); N];
        for (function, name) in functions.iter_mut().zip(names) {
            let c_name = CString::new(name).map_err(|_| Error::Argument(format!("{name:?} is no name")))?;
            // SAFETY: the module is loaded; the result is written through the pointer.
            check("cuModuleGetFunction", unsafe {
                sys::cuModuleGetFunction(&raw mut function.0, module.0, c_name.as_ptr())
            })?;
        }
        Ok((module, functions))
    }

    /// Zeroed device memory.
    pub(super) fn allocate(&self, bytes: usize) -> Result<DeviceBuffer> {
        let _entered = self.enter()?;
        let mut address = 0;
        // SAFETY: the result is written through the pointer.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) })?;
        let buffer = DeviceBuffer { address, bytes };
        // SAFETY: the buffer has that many bytes.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(address, 0, bytes) })?;
        Ok(buffer)
    }

    /// A stream that does not synchronise with the default stream.
    pub(super) fn create_stream(&self) -> Result<OwnStream> {
        let _entered = self.enter()?;
        let mut handle = null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the result is written through the pointer.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut handle, flags) })?;
        Ok(OwnStream(handle))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: gives back the reference that `open` took. A refusal (process teardown) changes nothing.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) };
    }
}

/// The context is current on this thread.
#[must_use]
pub(super) struct Entered {
    pushed: bool,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = null_mut();
            // SAFETY: takes back what `enter` pushed on this thread.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}

/// Loaded code. Lives as long as the process: captured graphs may hold its functions.
#[derive(Debug)]
pub(super) struct Module(sys::CUmodule);

// SAFETY: a handle; see `Device`.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// A kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Function(sys::CUfunction);

// SAFETY: a handle; see `Device`.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// Launches on a stream of the current context; captured if the stream is being captured.
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameter types, in order, and the memory that they name stays valid
    /// until the kernel has run, at each replay too.
    pub(super) unsafe fn launch(
        self,
        call: &'static str,
        stream: Stream,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: by the caller's contract.
        check(call, unsafe {
            sys::cuLaunchKernel(
                self.0,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.0 as sys::CUstream,
                arguments.as_mut_ptr(),
                null_mut(),
            )
        })
    }
}

/// Device memory. Not freed before the process ends where graphs may hold it: the owner decides by forgetting it.
#[derive(Debug)]
pub(super) struct DeviceBuffer {
    address: sys::CUdeviceptr,
    bytes: usize,
}

impl DeviceBuffer {
    pub(super) fn ptr(&self) -> DevicePtr {
        DevicePtr(self.address)
    }

    /// Copies host bytes to the start of the buffer; synchronous.
    pub(super) fn write(&self, bytes: &[u8]) -> Result<()> {
        assert!(bytes.len() <= self.bytes, "{} of {} bytes", bytes.len(), self.bytes);
        // SAFETY: both ranges have that many bytes.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(self.address, bytes.as_ptr().cast(), bytes.len())
        })
    }

    /// Copies the start of the buffer to the host; synchronous.
    pub(super) fn read(&self, bytes: &mut [u8]) -> Result<()> {
        assert!(bytes.len() <= self.bytes, "{} of {} bytes", bytes.len(), self.bytes);
        // SAFETY: both ranges have that many bytes.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.address, bytes.len())
        })
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `Device::allocate`; freeing waits for kernels that use it. A refusal (process teardown)
        // changes nothing.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// A stream of our own.
pub(super) struct OwnStream(sys::CUstream);

impl OwnStream {
    pub(super) fn stream(&self) -> Stream {
        Stream(self.0 as usize)
    }

    /// Whether everything on it has run.
    pub(super) fn is_done(&self) -> Result<bool> {
        // SAFETY: a live stream.
        match unsafe { sys::cuStreamQuery(self.0) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => check("cuStreamQuery", status).map(|()| true),
        }
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        // SAFETY: created by `Device::create_stream`; pending work still completes.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

/// Registers host memory with the driver for all contexts and maps it for the device.
///
/// # Safety
/// The range is mapped, page-aligned, and stays mapped until [`unregister_host`].
pub(super) unsafe fn register_host(at: *mut u8, bytes: usize) -> Result<DevicePtr> {
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
    // SAFETY: by the caller's contract.
    check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(at.cast(), bytes, flags) })?;
    let device = device_pointer(at);
    if device.is_err() {
        unregister_host(at);
    }
    device
}

/// Takes back a registration.
pub(super) fn unregister_host(at: *mut u8) {
    // SAFETY: the driver refuses an address that is not registered.
    let _ = unsafe { sys::cuMemHostUnregister(at.cast()) };
}

/// Pinned and mapped memory from the driver, for where registering is refused.
pub(super) fn allocate_host(bytes: usize) -> Result<(*mut u8, DevicePtr)> {
    let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
    let mut at = null_mut();
    // SAFETY: the result is written through the pointer.
    check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut at, bytes, flags) })?;
    match device_pointer(at.cast()) {
        Ok(device) => Ok((at.cast(), device)),
        Err(error) => {
            free_host(at.cast());
            Err(error)
        }
    }
}

/// Frees memory of [`allocate_host`].
pub(super) fn free_host(at: *mut u8) {
    // SAFETY: the driver refuses an address that it did not allocate.
    let _ = unsafe { sys::cuMemFreeHost(at.cast()) };
}

fn device_pointer(at: *mut u8) -> Result<DevicePtr> {
    let mut device = 0;
    // SAFETY: the driver refuses an address that is not mapped; the result is written through the pointer.
    check("cuMemHostGetDevicePointer", unsafe {
        sys::cuMemHostGetDevicePointer_v2(&raw mut device, at.cast(), 0)
    })?;
    Ok(DevicePtr(device))
}
