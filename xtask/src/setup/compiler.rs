//! A rustc that can build `core` for the BPF target: one that is installed with its source.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Result, bail};

use super::apt;
use crate::{rustc_version::RustcVersion, workspace::capture};

const DEBIAN_PACKAGES: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];

const SYSTEM_BIN: &str = "/usr/bin";

/// LLVM releases that the linker supports (`linker.rs`).
const LLVM_MAJORS: std::ops::RangeInclusive<u32> = 21..=23;

/// A compiler with its source.
#[derive(Debug, Clone)]
pub(crate) struct Compiler {
    pub(crate) cargo: PathBuf,
    pub(crate) rustc: PathBuf,
    pub(crate) version: RustcVersion,
}

impl Compiler {
    /// Returns its cargo as a command, without the environment variables of the outer cargo, rustup
    /// and shell.
    ///
    /// Several toolchains are used in one build: a variable for the outer one (`RUSTFLAGS`,
    /// `RUSTUP_TOOLCHAIN`, `CARGO_BUILD_TARGET`, the library path of another rustc) would break
    /// this one.
    pub(crate) fn cargo(&self) -> Command {
        let mut cargo = self.clean(&self.cargo);
        cargo.env("RUSTC", &self.rustc);
        cargo
    }

    /// Returns its rustc as a command, with the same clean environment.
    pub(crate) fn rustc(&self) -> Command {
        self.clean(&self.rustc)
    }

    fn clean(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        for (name, _) in env::vars_os() {
            if is_for_another_toolchain(&name.to_string_lossy()) {
                command.env_remove(name);
            }
        }
        if !self.version.is_nightly() {
            // `-Z build-std` is the one unstable thing needed; this opens it on a release compiler.
            command.env("RUSTC_BOOTSTRAP", "1");
        }
        command
    }

    fn at(bin: &Path) -> Option<Self> {
        let (cargo, rustc) = (bin.join("cargo"), bin.join("rustc"));
        let source = bin
            .parent()?
            .join("lib/rustlib/src/rust/library/core/Cargo.toml");
        if !(cargo.is_file() && rustc.is_file() && source.is_file()) {
            return None;
        }
        let told = capture(Command::new(&rustc).arg("-vV")).ok()?;
        let version = RustcVersion::parse(&told).ok()?;
        LLVM_MAJORS.contains(&version.llvm_major).then_some(Self {
            cargo,
            rustc,
            version,
        })
    }
}

impl fmt::Display for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RustcVersion {
            release,
            llvm_major,
            ..
        } = &self.version;
        write!(f, "{} ({release}, LLVM {llvm_major})", self.rustc.display())
    }
}

/// Returns every usable compiler: rustup toolchains with `rust-src`, nightlies first, then the
/// system's.
pub(super) fn find() -> Vec<Compiler> {
    let mut toolchains: Vec<PathBuf> = fs::read_dir(rustup_toolchains())
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    toolchains.sort_by_key(|path| {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        (!name.starts_with("nightly"), name)
    });
    toolchains
        .iter()
        .map(|toolchain| toolchain.join("bin"))
        .chain([PathBuf::from(SYSTEM_BIN)])
        .filter_map(|bin| Compiler::at(&bin))
        .collect()
}

/// Installs Debian's compiler, unless it is installed already, in which case it was found
/// unsuitable before.
pub(super) fn install() -> Result<Compiler> {
    let system = Path::new(SYSTEM_BIN);
    if apt::is_here() && Compiler::at(system).is_none() {
        apt::install(&DEBIAN_PACKAGES)?;
        if let Some(found) = Compiler::at(system) {
            return Ok(found);
        }
    }
    bail!(
        "no compiler for the BPF programs: looked for a toolchain with rust-src in {}, and for a \
         rustc with its source in /usr; its LLVM must be {} to {}.\nInstall one: `rustup toolchain \
         install nightly --component rust-src`, or on Debian `apt-get install {}`",
        rustup_toolchains().display(),
        LLVM_MAJORS.start(),
        LLVM_MAJORS.end(),
        DEBIAN_PACKAGES.join(" "),
    )
}

fn rustup_toolchains() -> PathBuf {
    env::var_os("RUSTUP_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(env::home_dir()?.join(".rustup")))
        .unwrap_or_default()
        .join("toolchains")
}

/// Whether an environment variable affects a cargo, a rustc or the loading of their libraries.
fn is_for_another_toolchain(name: &str) -> bool {
    const PREFIXES: [&str; 9] = [
        "CARGO_BUILD_",
        "CARGO_PKG_",
        "CARGO_MANIFEST_",
        "CARGO_BIN_",
        "CARGO_CRATE_",
        "CARGO_PROFILE_",
        "CARGO_TARGET_",
        "CARGO_UNSTABLE_",
        "RUSTC",
    ];
    const NAMES: [&str; 8] = [
        "CARGO",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_INCREMENTAL",
        "CARGO_RESOLVER_INCOMPATIBLE_RUST_VERSIONS",
        "LD_LIBRARY_PATH",
        "RUSTFLAGS",
        "RUSTUP_TOOLCHAIN",
        "RUST_TARGET_PATH",
    ];
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
#[path = "compiler_test.rs"]
mod tests;
