//! Finds the tools that this machine needs, and installs those that are missing.
//!
//! Every tool is first looked for as a file, so on a machine that has them all no package manager
//! runs. Only Debian packages are installed automatically; on other systems the error says what to
//! install.

mod apt;
mod cni_clients;
mod compiler;
mod cross;
mod debian;
mod kernels;
mod linker;
pub(crate) mod packagers;
mod packages;
mod stun_client;
mod tools;
mod userland;

use std::path::PathBuf;

use anyhow::Result;

pub(crate) use compiler::Compiler;
pub(crate) use linker::Linker;

use crate::workspace::{Workspace, say};

/// A compiler for the BPF target, and a linker that can read its bitcode.
pub(crate) struct BpfToolchain {
    pub(crate) compiler: Compiler,
    pub(crate) linker: Linker,
}

/// Finds or installs a compiler and a linker for the BPF object that fit each other.
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

/// Finds or installs the programs that the tests, the demo and the benchmarks call.
pub(crate) fn test_tools() -> Result<()> {
    tools::find_or_install()
}

/// Finds or installs the few programs that the demo of user mode calls.
pub(crate) fn user_mode_tools() -> Result<()> {
    tools::find_or_install_of_user_mode()
}

/// Finds or installs the programs that only the benchmarks compare slipgate with.
pub(crate) fn benchmarked_programs() -> Result<()> {
    tools::find_or_install_of_benchmarks()
}

/// Finds or builds a program that makes packages.
pub(crate) fn packager(workspace: &Workspace, which: &packagers::Packager) -> Result<PathBuf> {
    packagers::find_or_install(workspace, which)
}

/// Finds or builds clients that test `slipgate cni`, of which Go must be able to fetch the modules.
pub(crate) fn cni_clients(workspace: &Workspace) -> Result<()> {
    cni_clients::find_or_build(workspace)
}

/// Finds or fetches the foreign STUN client that tests how translated ports behave.
pub(crate) fn stun_client(workspace: &Workspace) -> Result<()> {
    stun_client::find_or_fetch(workspace)
}

/// Finds or installs what links programs for another machine, and returns the linker.
pub(crate) fn cross_linker(workspace: &Workspace, target: &str) -> Result<PathBuf> {
    cross::find_or_install(workspace, target)
}

/// Finds or adds the standard library for another machine, with which programs are checked.
pub(crate) fn cross_library(workspace: &Workspace, target: &str) -> Result<()> {
    cross::standard_library(workspace, target)
}

/// Finds or makes the disk with a Debian on it, on which packages are tried.
pub(crate) fn debian(workspace: &Workspace) -> Result<()> {
    debian::find_or_make(workspace)
}

/// Finds or downloads other kernels than this machine's, and QEMU to boot them.
pub(crate) fn kernels(workspace: &Workspace) -> Result<()> {
    kernels::find_or_fetch(workspace)
}

/// Finds or installs all of the above, and prints what was found.
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
    match stun_client(workspace) {
        Ok(()) => println!("STUN client   {}", stun_client::PACKAGE),
        Err(why) => println!("STUN client   none: {why:#}"),
    }
    Ok(())
}
