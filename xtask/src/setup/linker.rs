//! bpf-linker, which links rustc's bitcode to a BPF object with BTF. Its LLVM must not be older
//! than rustc's.

use std::{
    env, fmt, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::{Compiler, apt};
use crate::{
    elf,
    workspace::{Scratch, Workspace, on_path, run, say},
};

const VERSION: &str = "0.13.0";

/// A bpf-linker that was tested with the compiler's output.
pub(crate) struct Linker {
    pub(crate) path: PathBuf,
    /// Path of llvm-strip; `None` if it is not installed. It reduces the objects to a tenth of
    /// their size.
    pub(crate) strip: Option<PathBuf>,
}

impl fmt::Display for Linker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())
    }
}

/// Returns a bpf-linker that works with this compiler: one that xtask built before, or one on
/// `PATH`.
pub(super) fn find(workspace: &Workspace, compiler: &Compiler) -> Option<Linker> {
    let ours = folder(workspace, compiler).join("bin/bpf-linker");
    [Some(ours), on_path("bpf-linker")]
        .into_iter()
        .flatten()
        .filter(|path| path.is_file())
        .find(|path| match links(compiler, path) {
            Ok(()) => true,
            Err(why) => {
                say(format!(
                    "{} does not serve {compiler}: {why:#}",
                    path.display()
                ));
                false
            }
        })
        .map(|path| Linker {
            path,
            strip: strip(compiler),
        })
}

/// Builds a bpf-linker for the compiler's LLVM, with that compiler, in the tools directory.
pub(super) fn install(workspace: &Workspace, compiler: &Compiler) -> Result<Linker> {
    let into = folder(workspace, compiler);
    build(compiler, &into)?;
    let path = into.join("bin/bpf-linker");
    links(compiler, &path).with_context(|| {
        format!(
            "{} was built, but does not serve {compiler}",
            path.display()
        )
    })?;
    Ok(Linker {
        path,
        strip: strip(compiler),
    })
}

fn folder(workspace: &Workspace, compiler: &Compiler) -> PathBuf {
    let llvm = compiler.version.llvm_major;
    workspace
        .tools()
        .join(format!("bpf-linker-{VERSION}-llvm-{llvm}"))
}

fn strip(compiler: &Compiler) -> Option<PathBuf> {
    let llvm = compiler.version.llvm_major;
    let versioned = PathBuf::from(format!("/usr/lib/llvm-{llvm}/bin/llvm-strip"));
    if versioned.is_file() {
        Some(versioned)
    } else {
        on_path("llvm-strip")
    }
}

fn build(compiler: &Compiler, into: &Path) -> Result<()> {
    let llvm = compiler.version.llvm_major;
    let prefix = PathBuf::from(format!("/usr/lib/llvm-{llvm}"));
    let needs = [
        (prefix.join("bin/llvm-config"), format!("llvm-{llvm}-dev")),
        (
            prefix.join("lib/libPolly.a"),
            format!("libpolly-{llvm}-dev"),
        ),
        (
            PathBuf::from("/usr/include/zlib.h"),
            "zlib1g-dev".to_owned(),
        ),
        (
            PathBuf::from("/usr/include/zstd.h"),
            "libzstd-dev".to_owned(),
        ),
    ];
    let missing: Vec<_> = needs
        .iter()
        .filter_map(|(file, package)| (!file.exists()).then_some(package.as_str()))
        .collect();
    if !missing.is_empty() {
        if !apt::is_here() {
            bail!(
                "no bpf-linker that works with {compiler}.\nInstall LLVM {llvm} with its headers and \
                 then `LLVM_PREFIX=<where it is> cargo install bpf-linker --version {VERSION} \
                 --no-default-features --features llvm-{llvm}`"
            );
        }
        apt::install(&missing)?;
    }
    say(format!(
        "building bpf-linker {VERSION} for LLVM {llvm} (about half a minute)"
    ));
    run(compiler
        .cargo()
        .args(["install", "bpf-linker", "--locked", "--quiet", "--force"])
        .args(["--version", VERSION, "--no-default-features"])
        .arg(format!("--features=llvm-{llvm}"))
        .arg("--root")
        .arg(into)
        .arg("--target-dir")
        .arg(into.join("build"))
        .env("LLVM_PREFIX", prefix)
        // LLVM does the work, and comes optimised.
        .envs([
            ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
            ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
            ("CARGO_PROFILE_RELEASE_LTO", "off"),
            ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0"),
        ]))?;
    // Intermediate files, some hundred megabytes: never needed again.
    fs::remove_dir_all(into.join("build")).ok();
    Ok(())
}

/// Checks the linker: compiles and links a minimal program, and looks for BTF in it.
fn links(compiler: &Compiler, linker: &Path) -> Result<()> {
    const PROGRAM: &str = r#"
        #![feature(no_core, lang_items)]
        #![allow(internal_features)]
        #![no_core]
        #[lang = "pointee_sized"]
        trait PointeeSized {}
        #[lang = "meta_sized"]
        trait MetaSized: PointeeSized {}
        #[lang = "sized"]
        trait Sized: MetaSized {}
        #[unsafe(no_mangle)]
        #[unsafe(link_section = "classifier")]
        extern "C" fn probe() -> i32 { 0 }
    "#;
    let scratch = Scratch::below(&env::temp_dir())?;
    let (source, object) = (
        scratch.path().join("probe.rs"),
        scratch.path().join("probe.o"),
    );
    fs::write(&source, PROGRAM)?;
    let mut rustc: Command = compiler.rustc();
    rustc
        .args([
            "--edition=2024",
            "--crate-type=cdylib",
            "--target=bpfel-unknown-none",
        ])
        .args(["-Cpanic=abort", "-Cdebuginfo=2", "-Clink-arg=--btf"])
        .arg(format!("-Clinker={}", linker.display()))
        .arg("-o")
        .args([&object, &source]);
    crate::workspace::capture(&mut rustc)?;
    elf::require_btf(&object)
}
