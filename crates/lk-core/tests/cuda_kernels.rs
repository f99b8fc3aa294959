//! The GPU kernels compile for every architecture that the compiler at hand knows; needs NVRTC, not a GPU.
#![cfg(feature = "cuda")]

use std::path::{Path, PathBuf};

use lk_core::Error;
use lk_core::cuda::{Device, KERNELS, Nvrtc, Target, source};

/// Architectures that must be served by machine code where the compiler knows them.
const WANTED: [u32; 7] = [75, 80, 86, 89, 90, 100, 120];

/// Folders of CUDA wheels in virtual environments of this checkout.
fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let list = |dir: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(dir).into_iter().flatten().filter_map(|e| Some(e.ok()?.path())).collect()
    };
    let environments = list(&root)
        .into_iter()
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(".venv")));
    environments
        .flat_map(|env| list(&env.join("lib")))
        .flat_map(|python| list(&python.join("site-packages/nvidia")))
        .map(|package| package.join("lib"))
        .collect()
}

#[expect(clippy::print_stderr, reason = "a skip says why")]
fn nvrtc() -> Option<Nvrtc> {
    match Nvrtc::load(&folders()) {
        Ok(nvrtc) => Some(nvrtc),
        Err(Error::CudaUnavailable(why)) => {
            eprintln!("skipped: {why}");
            None
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn kernels_compile_for_every_architecture() {
    let Some(nvrtc) = nvrtc() else { return };
    let mut compiled = Vec::new();
    for arch in WANTED.into_iter().filter(|a| nvrtc.architectures.contains(a)) {
        let cubin = nvrtc.compile(&source(), Target::Sm(arch)).unwrap();
        assert!(cubin.starts_with(b"\x7fELF"), "sm_{arch}: no ELF file");
        for kernel in KERNELS {
            assert!(contains(&cubin, kernel.as_bytes()), "sm_{arch}: no {kernel}");
        }
        compiled.push(arch);
    }
    assert!(!compiled.is_empty(), "NVRTC {:?} knows none of {WANTED:?}", nvrtc.version);
    eprintln!("NVRTC {}.{}: compiled for {compiled:?}", nvrtc.version.0, nvrtc.version.1);
    let oldest = *nvrtc.architectures.iter().min().unwrap();
    let ptx = nvrtc.compile(&source(), Target::Compute(oldest)).unwrap();
    assert!(contains(&ptx, b".entry lk_receive") && ptx.ends_with(&[0]));
}

#[test]
fn payloads_move_by_sixteen_bytes_and_flags_by_system_scope() {
    let Some(nvrtc) = nvrtc() else { return };
    let oldest = *nvrtc.architectures.iter().min().unwrap();
    let ptx = nvrtc.compile(&source(), Target::Compute(oldest)).unwrap();
    for instruction in [
        "ld.relaxed.sys.global.v4.u32",
        "st.global.v4",
        "ld.acquire.sys.global.u64",
        "st.release.sys.global.u64",
        "fence.sc.sys",
    ] {
        // Compilers before 13 spell the fence as they did before there were scopes.
        let found = contains(&ptx, instruction.as_bytes())
            || (instruction == "fence.sc.sys" && contains(&ptx, b"membar.sys"));
        assert!(found, "{instruction} is not in the code");
    }
}

#[test]
fn a_compile_error_brings_the_log_and_results_are_kept() {
    let Some(nvrtc) = nvrtc() else { return };
    let target = Target::Sm(*nvrtc.architectures.iter().max().unwrap());
    let error = nvrtc.compile("__global__ void k() { undeclared(); }", target).unwrap_err().to_string();
    assert!(error.contains("undeclared") && error.contains("handover.cu"), "{error}");
    let cache = std::env::temp_dir().join(format!("lvllm-kernels-{}", std::process::id()));
    let text = "extern \"C\" __global__ void k(int* x) { *x = 1; }";
    let first = nvrtc.compile_cached(text, target, Some(&cache)).unwrap();
    let kept = std::fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path().join("image");
    assert_eq!(std::fs::read(&kept).unwrap(), first);
    // A cut file is compiled anew.
    std::fs::write(&kept, b"").unwrap();
    assert_eq!(nvrtc.compile_cached(text, target, Some(&cache)).unwrap().len(), first.len());
    assert_eq!(std::fs::read(&kept).unwrap().len(), first.len());
    std::fs::remove_dir_all(&cache).unwrap();
}

#[test]
fn without_driver_or_device_the_error_says_so() {
    match Device::open(4096) {
        Err(Error::CudaUnavailable(text)) => {
            assert!(text.contains("libcuda") || text.contains("device"), "{text}");
        }
        other => panic!("device 4096: {other:?}"),
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|w| w == part)
}
