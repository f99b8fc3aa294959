//! Compiles the embedded kernels for the device at hand, once per machine.
//!
//! Only eight functions of NVRTC are used, so they are looked up by hand: the library's file name carries the major
//! version, comes with torch outside of the loader's path, and may be newer than any list made today.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{fs, io};

use crate::{Error, Result};

use super::slot::header_macros;

/// Threads of a block of both kernels.
pub(super) const THREADS: u32 = 512;
/// Names of the kernels in the module.
pub const KERNELS: [&str; 2] = ["lk_send", "lk_receive"];

const SOURCE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../kernels/cuda/handover.cu"));
/// Major versions of the library, newest first, for where no plain `libnvrtc.so` exists.
const MAJORS: std::ops::RangeInclusive<u32> = 11..=19;

/// The kernels' source with the macros that it expects.
pub fn source() -> String {
    format!("#define LK_THREADS {THREADS}\n{}#line 1 \"handover.cu\"\n{SOURCE}", header_macros())
}

/// What to compile for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// Machine code of exactly this architecture (major · 10 + minor).
    Sm(u32),
    /// PTX of an older one, which the driver compiles on.
    Compute(u32),
}

impl Target {
    /// The best that a compiler with these architectures can do for a device.
    ///
    /// # Errors
    /// [`Error::Nvrtc`] when the device is older than every architecture of the compiler or than 7.0.
    pub fn choose(capability: (u32, u32), supported: &[u32]) -> Result<Self> {
        let wanted = capability.0 * 10 + capability.1;
        let refuse = |why: &str| {
            Err(Error::Nvrtc(format!(
                "this GPU has compute capability {}.{}, {why}: serve with LVLLM_MOE_NUMA_ENABLED unset",
                capability.0, capability.1
            )))
        };
        if wanted < 70 {
            return refuse("the hand-over needs 7.0");
        }
        if supported.contains(&wanted) {
            return Ok(Self::Sm(wanted));
        }
        match supported.iter().filter(|&&arch| arch < wanted).max() {
            Some(&older) => Ok(Self::Compute(older)),
            None => refuse("older than the NVRTC library supports"),
        }
    }

    fn option(self) -> String {
        match self {
            Self::Sm(arch) => format!("--gpu-architecture=sm_{arch}"),
            Self::Compute(arch) => format!("--gpu-architecture=compute_{arch}"),
        }
    }
}

type Program = *mut c_void;
type Status = c_int;

/// The library.
pub struct Nvrtc {
    /// Version, major and minor.
    pub version: (u32, u32),
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    cubin: Getter,
    ptx: Getter,
    /// Architectures that it compiles for, ascending.
    pub architectures: Vec<u32>,
}

/// Size and content of one kind of output.
struct Getter {
    size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
}

/// Looks a function up and gives it its type.
macro_rules! symbol {
    ($library:expr, $name:literal) => {{
        // SAFETY: a live library handle and a C string.
        let address = unsafe { libc::dlsym($library, concat!($name, "\0").as_ptr().cast()) };
        if address.is_null() {
            return Err(Error::CudaUnavailable(format!("the NVRTC library has no {}", $name)));
        }
        // SAFETY: the type is that of the function in NVRTC's header, unchanged since its first release.
        unsafe { std::mem::transmute::<*mut c_void, _>(address) }
    }};
}

impl Nvrtc {
    /// Loads the library: the process's own if one is loaded, else from the folders, else from the loader's path.
    ///
    /// # Errors
    /// [`Error::CudaUnavailable`] with what was tried.
    #[expect(clippy::missing_transmute_annotations, reason = "the field or binding names the type")]
    pub fn load(folders: &[PathBuf]) -> Result<Self> {
        let library = open(folders)?;
        let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status =
            symbol!(library, "nvrtcVersion");
        let count: unsafe extern "C" fn(*mut c_int) -> Status = symbol!(library, "nvrtcGetNumSupportedArchs");
        let list: unsafe extern "C" fn(*mut c_int) -> Status = symbol!(library, "nvrtcGetSupportedArchs");
        let (mut major, mut minor, mut n) = (0, 0, 0);
        // SAFETY: the results are written through the pointers.
        status("nvrtcVersion", unsafe { version(&raw mut major, &raw mut minor) })?;
        // SAFETY: as above.
        status("nvrtcGetNumSupportedArchs", unsafe { count(&raw mut n) })?;
        let mut architectures = vec![0 as c_int; n.max(0) as usize];
        // SAFETY: the vector has as many elements as the library said.
        status("nvrtcGetSupportedArchs", unsafe { list(architectures.as_mut_ptr()) })?;
        Ok(Self {
            version: (major as u32, minor as u32),
            create: symbol!(library, "nvrtcCreateProgram"),
            destroy: symbol!(library, "nvrtcDestroyProgram"),
            compile: symbol!(library, "nvrtcCompileProgram"),
            log_size: symbol!(library, "nvrtcGetProgramLogSize"),
            log: symbol!(library, "nvrtcGetProgramLog"),
            cubin: Getter {
                size: symbol!(library, "nvrtcGetCUBINSize"),
                get: symbol!(library, "nvrtcGetCUBIN"),
            },
            ptx: Getter { size: symbol!(library, "nvrtcGetPTXSize"), get: symbol!(library, "nvrtcGetPTX") },
            architectures: architectures.into_iter().map(|a| a as u32).collect(),
        })
    }

    /// Compiles `source` to a cubin or PTX.
    ///
    /// # Errors
    /// [`Error::Nvrtc`] with the compiler's log.
    pub fn compile(&self, source: &str, target: Target) -> Result<Vec<u8>> {
        let text = |s: &str| {
            CString::new(s).map_err(|_| Error::Nvrtc("a NUL character in source or options".to_owned()))
        };
        let (source, name) = (text(source)?, text("handover.cu")?);
        let options = [text(&target.option())?, text("--std=c++17")?];
        let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program = Guard { nvrtc: self, program: null_mut() };
        // SAFETY: C strings that outlive the call, no headers.
        let made = unsafe {
            (self.create)(&raw mut program.program, source.as_ptr(), name.as_ptr(), 0, null(), null())
        };
        status("nvrtcCreateProgram", made)?;
        // SAFETY: a live program; the options outlive the call.
        let compiled = unsafe { (self.compile)(program.program, pointers.len() as c_int, pointers.as_ptr()) };
        if compiled != 0 {
            let log = fetch(program.program, self.log_size, self.log).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            return Err(Error::Nvrtc(format!(
                "{} does not compile with NVRTC {}.{} (status {compiled}): {}",
                target.option(),
                self.version.0,
                self.version.1,
                log.trim_end_matches(['\0', '\n'])
            )));
        }
        let getter = if matches!(target, Target::Sm(_)) { &self.cubin } else { &self.ptx };
        fetch(program.program, getter.size, getter.get)
    }

    /// As [`Nvrtc::compile`], through a folder of earlier results; a folder that cannot be used costs a compilation.
    ///
    /// # Errors
    /// As [`Nvrtc::compile`].
    pub fn compile_cached(&self, source: &str, target: Target, cache: Option<&Path>) -> Result<Vec<u8>> {
        let Some(cache) = cache else { return self.compile(source, target) };
        let mut hash = DefaultHasher::new();
        (source, target, self.version, env!("CARGO_PKG_VERSION")).hash(&mut hash);
        let folder = cache.join(format!("handover-{:016x}", hash.finish()));
        let file = folder.join("image");
        if let Ok(image) = fs::read(&file)
            && is_image(&image)
        {
            return Ok(image);
        }
        let image = self.compile(source, target)?;
        if let Err(error) = publish(cache, &folder, &image) {
            tracing::debug!("the compiled kernels are not kept in {}: {error}", folder.display());
        }
        Ok(image)
    }
}

/// Whether bytes can be an image at all: an ELF file, or text that ends with 0.
fn is_image(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF") || (bytes.starts_with(b"//") && bytes.ends_with(&[0]))
}

/// Puts a folder with the image in place in one step: several workers start at once, and each may see all or nothing.
fn publish(cache: &Path, folder: &Path, image: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    fs::create_dir_all(cache)?;
    let unique = format!(".{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let fresh = cache.join(unique);
    fs::create_dir(&fresh)?;
    let written = (|| {
        let mut file = fs::File::create(fresh.join("image"))?;
        file.write_all(image)?;
        file.sync_all()?;
        // An unusable folder of that name would stand in the way for ever.
        if folder.exists() && !fs::read(folder.join("image")).is_ok_and(|i| is_image(&i)) {
            let _ = fs::remove_dir_all(folder);
        }
        fs::rename(&fresh, folder)
    })();
    if written.is_err() {
        let _ = fs::remove_dir_all(&fresh);
        // Another worker was first: what is there is as good.
        if folder.join("image").exists() {
            return Ok(());
        }
    }
    written
}

struct Guard<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: a live program, destroyed once.
            unsafe { (self.nvrtc.destroy)(&raw mut self.program) };
        }
    }
}

fn fetch(
    program: Program,
    size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
) -> Result<Vec<u8>> {
    let mut bytes = 0;
    // SAFETY: a live program; the size is written through the pointer.
    status("nvrtcGet…Size", unsafe { size(program, &raw mut bytes) })?;
    let mut out = vec![0u8; bytes];
    // SAFETY: the buffer has the size that the library asked for.
    status("nvrtcGet…", unsafe { get(program, out.as_mut_ptr().cast()) })?;
    Ok(out)
}

fn status(call: &str, status: Status) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Error::Nvrtc(format!("{call} returned {status}"))) }
}

fn open(folders: &[PathBuf]) -> Result<*mut c_void> {
    let names: Vec<String> = std::iter::once("libnvrtc.so".to_owned())
        .chain(MAJORS.rev().map(|major| format!("libnvrtc.so.{major}")))
        .collect();
    let try_open = |path: &Path, flags: c_int| {
        let path = CString::new(path.as_os_str().as_bytes()).ok()?;
        // SAFETY: a C string; the library's initialisers are NVIDIA's.
        let handle = unsafe { libc::dlopen(path.as_ptr(), flags) };
        (!handle.is_null()).then_some(handle)
    };
    let loaded = names.iter().find_map(|n| try_open(Path::new(n), libc::RTLD_NOW | libc::RTLD_NOLOAD));
    let in_folders = || {
        folders.iter().flat_map(|f| names.iter().map(move |n| f.join(n))).find_map(|library| {
            // libnvrtc opens its builtins by bare name and has no run path: in a folder that the loader does not know,
            // they are found only if they are loaded already.
            for builtins in
                library.parent().and_then(|f| std::fs::read_dir(f).ok()).into_iter().flatten().flatten()
            {
                if builtins.file_name().as_bytes().starts_with(b"libnvrtc-builtins.so") {
                    try_open(&builtins.path(), libc::RTLD_NOW | libc::RTLD_GLOBAL);
                }
            }
            try_open(&library, libc::RTLD_NOW)
        })
    };
    let on_path = || names.iter().find_map(|n| try_open(Path::new(n), libc::RTLD_NOW));
    loaded.or_else(in_folders).or_else(on_path).ok_or_else(|| {
        // SAFETY: dlerror returns null or a C string that is valid until the next call on this thread.
        let text = unsafe {
            let text = libc::dlerror();
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        let folders: Vec<_> = folders.iter().map(|f| f.display().to_string()).collect();
        Error::CudaUnavailable(format!(
            "no libnvrtc.so in [{}] nor on the loader's path ({text}): install the package nvidia-cuda-nvrtc, which \
             torch's CUDA build depends on, or a CUDA toolkit",
            folders.join(", ")
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_target_is_chosen() {
        let known = [75, 80, 86, 89, 90];
        assert_eq!(Target::choose((9, 0), &known).unwrap(), Target::Sm(90));
        assert_eq!(Target::choose((12, 0), &known).unwrap(), Target::Compute(90));
        assert_eq!(Target::choose((8, 7), &known).unwrap(), Target::Compute(86));
        for (capability, text) in [((6, 1), "needs 7.0"), ((7, 0), "older than")] {
            let error = Target::choose(capability, &known).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn a_published_image_replaces_a_broken_one_and_survives_rivals() {
        let cache = std::env::temp_dir().join(format!("lvllm-nvrtc-test-{}", std::process::id()));
        let folder = cache.join("handover-0");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("image"), b"truncated").unwrap();
        let image = b"\x7fELF of a test".to_vec();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| publish(&cache, &folder, &image).unwrap());
            }
        });
        assert_eq!(fs::read(folder.join("image")).unwrap(), image);
        let left: Vec<_> = fs::read_dir(&cache).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        fs::remove_dir_all(&cache).unwrap();
    }
}
