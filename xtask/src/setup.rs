//! What this machine needs, how it is found, and how it is installed where it is missing.
//!
//! Everything is looked for as a file first, so that a machine which has it all costs no package
//! manager's time. Only Debian's packages are installed by themselves; elsewhere the error says
//! what to install.

mod apt;
mod compiler;
mod kernels;
mod linker;
mod tools;

use anyhow::Result;

pub(crate) use compiler::Compiler;
pub(crate) use linker::Linker;

use crate::workspace::{Workspace, say};

/// A compiler for the BPF target and the linker that understands its bitcode.
pub(crate) struct BpfToolchain {
    pub(crate) compiler: Compiler,
    pub(crate) linker: Linker,
}

/// Finds or installs what builds the BPF object: a compiler and a linker that fit.
pub(crate) fn bpf(workspace: &Workspace) -> Result<BpfToolchain> {
    let compilers = compiler::find();
    for compiler in &compilers {
        if let Some(linker) = linker::find(workspace, compiler) {
            return Ok(BpfToolchain {
                compiler: compiler.clone(),
                linker,
            });
        }
    }
    for compiler in &compilers {
        match linker::install(workspace, compiler) {
            Ok(linker) => {
                return Ok(BpfToolchain {
                    compiler: compiler.clone(),
                    linker,
                });
            }
            Err(why) => say(format!("no linker for {compiler}: {why:#}")),
        }
    }
    let compiler = compiler::install()?;
    let linker = match linker::find(workspace, &compiler) {
        Some(linker) => linker,
        None => linker::install(workspace, &compiler)?,
    };
    Ok(BpfToolchain { compiler, linker })
}

/// Finds or installs the programs that tests, demo and benchmarks call.
pub(crate) fn test_tools() -> Result<()> {
    tools::find_or_install()
}

/// Finds or installs the resolvers that the benchmarks measure beside ours.
pub(crate) fn resolvers() -> Result<()> {
    tools::find_or_install_resolvers()
}

/// Finds or fetches other kernels than this machine's, and QEMU to boot them.
pub(crate) fn kernels(workspace: &Workspace) -> Result<()> {
    kernels::find_or_fetch(workspace)
}

/// All of the above, said in words.
pub(crate) fn everything(workspace: &Workspace) -> Result<()> {
    let BpfToolchain { compiler, linker } = bpf(workspace)?;
    println!("BPF compiler  {compiler}");
    println!("BPF linker    {linker}");
    test_tools()?;
    println!(
        "test tools    {}",
        tools::names().collect::<Vec<_>>().join(" ")
    );
    match kernels(workspace) {
        Ok(()) => println!(
            "kernels       {}",
            kernels::names().collect::<Vec<_>>().join(" ")
        ),
        // The tests can do without, and say so.
        Err(why) => println!("kernels       none: {why:#}"),
    }
    Ok(())
}
