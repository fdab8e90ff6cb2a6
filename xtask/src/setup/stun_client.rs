//! coturn's client for NAT behaviour discovery (RFC 5780), which tests `[nat.udp]` of a policy:
//! `target/tools/coturn`, as its Debian package has it. The package is unpacked, not installed,
//! because it starts a TURN server.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::{
    apt,
    packages::{Lists, scratch_in, unpack_into},
};
use crate::workspace::Workspace;

/// The client's package.
pub(super) const PACKAGE: &str = "coturn";
const PROGRAM: &str = "usr/bin/turnutils_natdiscovery";
/// Beginning of the names of the packages with the client's libraries that no other tool of ours
/// brings. The server has more.
const LIBRARIES: &str = "libevent";

pub(super) fn find_or_fetch(workspace: &Workspace) -> Result<()> {
    let target = workspace.tools().join(PACKAGE);
    if target.join(PROGRAM).is_file() {
        return Ok(());
    }
    let scratch = scratch_in(&workspace.tools())?;
    // Lists may lack it, or be older than what the mirror still has: they are refreshed, once.
    let tree = fetch(&scratch.path().join("known")).or_else(|_| {
        apt::update()?;
        fetch(&scratch.path().join("updated"))
    })?;
    fs::rename(&tree, &target)
        .with_context(|| format!("could not put {PACKAGE} into {}", target.display()))
}

/// Downloads the packages into `scratch`, and unpacks them. Returns the directory with their files.
fn fetch(scratch: &Path) -> Result<PathBuf> {
    let lists = Lists::of_this_machine();
    let mut packages = lists.depends_of(PACKAGE)?;
    packages.retain(|name| name.starts_with(LIBRARIES));
    packages.push(PACKAGE.to_owned());
    let tree = scratch.join("tree");
    for name in &packages {
        let into = scratch.join(name);
        fs::create_dir_all(&into)?;
        let package = lists.download(name, &into)?;
        unpack_into(&package, &tree)?;
    }
    Ok(tree)
}
