//! What the CPU supports, found at run time and capped by choice.

use crate::{Error, Result};

/// Instruction-set levels in the order of richness; a level caps what kernels may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IsaLevel {
    /// Portable code.
    Scalar,
    /// AVX2, FMA, F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ.
    Avx512,
    /// The former with VNNI (and VBMI where the CPU has it).
    Avx512Vnni,
    /// The former with BF16.
    Avx512Bf16,
    /// The former with AMX tiles (bf16 and int8).
    Amx,
}

impl IsaLevel {
    /// All levels, poorest first.
    pub const ALL: [Self; 6] =
        [Self::Scalar, Self::Avx2, Self::Avx512, Self::Avx512Vnni, Self::Avx512Bf16, Self::Amx];

    /// The name that `LVLLM_ISA` uses.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Avx512Vnni => "avx512_vnni",
            Self::Avx512Bf16 => "avx512_bf16",
            Self::Amx => "amx",
        }
    }

    /// Inverse of [`IsaLevel::name`].
    ///
    /// # Errors
    ///
    /// [`Error::Config`] naming the value and all names.
    pub fn parse(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|l| l.name() == name.trim().to_ascii_lowercase()).ok_or_else(|| {
            let all: Vec<_> = Self::ALL.iter().map(|l| l.name()).collect();
            Error::Config(format!("LVLLM_ISA={name}: not an instruction set; use one of {}", all.join(", ")))
        })
    }
}

impl std::fmt::Display for IsaLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Features of this CPU that kernels may use. Holding a flag here is the proof that kernels rely on.
#[expect(clippy::struct_excessive_bools, reason = "independent feature flags of a CPU")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    avx2: bool,
    avx512: bool,
    avx512_vnni: bool,
    avx512_vbmi: bool,
    avx512_bf16: bool,
    avx_vnni: bool,
    amx: bool,
}

impl Cpu {
    /// Portable code only.
    pub const NONE: Self = Self {
        avx2: false,
        avx512: false,
        avx512_vnni: false,
        avx512_vbmi: false,
        avx512_bf16: false,
        avx_vnni: false,
        amx: false,
    };

    /// Reads CPUID and, for AMX, the permission of the operating system (asked once per process).
    #[cfg(target_arch = "x86_64")]
    pub fn detect() -> Self {
        use std::arch::is_x86_feature_detected as has;
        let avx2 = has!("avx2") && has!("fma") && has!("f16c");
        let avx512 = avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq");
        let avx512_vnni = avx512 && has!("avx512vnni");
        let avx512_bf16 = avx512 && has!("avx512bf16");
        Self {
            avx2,
            avx512,
            avx512_vnni,
            avx512_vbmi: avx512 && has!("avx512vbmi"),
            avx512_bf16,
            avx_vnni: avx2 && has!("avxvnni"),
            amx: avx512_vnni && avx512_bf16 && super::amx::available(),
        }
    }

    /// No vector extension is known for this architecture.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn detect() -> Self {
        Self::NONE
    }

    /// The richest level that the CPU reaches.
    pub fn level(&self) -> IsaLevel {
        if self.amx {
            IsaLevel::Amx
        } else if self.avx512_bf16 {
            IsaLevel::Avx512Bf16
        } else if self.avx512_vnni {
            IsaLevel::Avx512Vnni
        } else if self.avx512 {
            IsaLevel::Avx512
        } else if self.avx2 {
            IsaLevel::Avx2
        } else {
            IsaLevel::Scalar
        }
    }

    /// Whether every feature that gives `level` its name is there.
    pub fn supports(&self, level: IsaLevel) -> bool {
        match level {
            IsaLevel::Scalar => true,
            IsaLevel::Avx2 => self.avx2,
            IsaLevel::Avx512 => self.avx512,
            IsaLevel::Avx512Vnni => self.avx512_vnni,
            IsaLevel::Avx512Bf16 => self.avx512_bf16,
            IsaLevel::Amx => self.amx,
        }
    }

    /// The same CPU without what lies above `level`.
    ///
    /// # Errors
    ///
    /// [`Error::UnsupportedIsa`] if the CPU does not reach `level`; names both.
    pub fn capped(self, level: IsaLevel) -> Result<Self> {
        if !self.supports(level) {
            return Err(Error::UnsupportedIsa(format!(
                "LVLLM_ISA={level} is not supported by this CPU, which reaches {}; unset LVLLM_ISA or choose a lower one",
                self.level()
            )));
        }
        Ok(Self {
            avx2: self.avx2 && level >= IsaLevel::Avx2,
            avx_vnni: self.avx_vnni && level >= IsaLevel::Avx512Vnni,
            avx512: self.avx512 && level >= IsaLevel::Avx512,
            avx512_vnni: self.avx512_vnni && level >= IsaLevel::Avx512Vnni,
            avx512_vbmi: self.avx512_vbmi && level >= IsaLevel::Avx512Vnni,
            avx512_bf16: self.avx512_bf16 && level >= IsaLevel::Avx512Bf16,
            amx: self.amx && level >= IsaLevel::Amx,
        })
    }

    /// AVX2, FMA and F16C may be used.
    pub fn avx2(&self) -> bool {
        self.avx2
    }

    /// AVX-512 F, BW, VL and DQ may be used.
    pub fn avx512(&self) -> bool {
        self.avx512
    }

    /// AVX-512 VNNI may be used.
    pub fn avx512_vnni(&self) -> bool {
        self.avx512_vnni
    }

    /// AVX-512 VBMI may be used.
    pub fn avx512_vbmi(&self) -> bool {
        self.avx512_vbmi
    }

    /// AVX-512 BF16 may be used.
    pub fn avx512_bf16(&self) -> bool {
        self.avx512_bf16
    }

    /// The VEX-encoded VNNI of CPUs without AVX-512 may be used.
    pub fn avx_vnni(&self) -> bool {
        self.avx_vnni
    }

    /// AMX tiles may be used.
    pub fn amx(&self) -> bool {
        self.amx
    }
}

impl std::fmt::Display for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let flags = [
            ("avx2", self.avx2),
            ("avx512", self.avx512),
            ("avx512_vnni", self.avx512_vnni),
            ("avx512_vbmi", self.avx512_vbmi),
            ("avx512_bf16", self.avx512_bf16),
            ("avx_vnni", self.avx_vnni),
            ("amx", self.amx),
        ];
        let have: Vec<_> = flags.iter().filter(|f| f.1).map(|f| f.0).collect();
        if have.is_empty() { f.write_str("scalar") } else { f.write_str(&have.join(" ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_names_are_refused() {
        for level in IsaLevel::ALL {
            assert_eq!(IsaLevel::parse(level.name()).ok(), Some(level));
        }
        let message = IsaLevel::parse("avx1024").err().map(|e| e.to_string()).unwrap_or_default();
        assert!(message.contains("avx1024") && message.contains("avx512_bf16"), "{message}");
    }

    #[test]
    fn a_cap_removes_everything_above_and_an_unreachable_cap_is_an_error() {
        let cpu = Cpu::detect();
        for level in IsaLevel::ALL {
            match cpu.capped(level) {
                Ok(capped) => assert_eq!(capped.level(), level),
                Err(Error::UnsupportedIsa(text)) => {
                    assert!(text.contains(level.name()) && text.contains(cpu.level().name()), "{text}");
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert!(matches!(Cpu::NONE.capped(IsaLevel::Avx2), Err(Error::UnsupportedIsa(_))));
    }
}
