//! coturn's client for NAT behaviour discovery (RFC 5780), which tests `[nat.udp]` of a policy:
//! `target/tools/coturn`, as its Debian package has it. The package is unpacked, not installed,
//! because it starts a TURN server.

use std::fs;

use anyhow::{Context, Result};

use super::packages::{fetch_unpacked, scratch_in};
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
    let tree = fetch_unpacked(scratch.path(), |lists| {
        let mut packages = lists.depends_of(PACKAGE)?;
        packages.retain(|name| name.starts_with(LIBRARIES));
        packages.push(PACKAGE.to_owned());
        Ok(packages)
    })?;
    fs::rename(&tree, &target)
        .with_context(|| format!("could not put {PACKAGE} into {}", target.display()))
}
