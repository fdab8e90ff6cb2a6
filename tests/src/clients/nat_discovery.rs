//! coturn's client for NAT behaviour discovery (RFC 5780): the same questions as [`super::stun`] asks,
//! by a program that is not ours.

use std::{
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
};

use super::stun::{Behaviour, Dependence};
use crate::{
    error::{Error, Result},
    netns::NetNs,
};

/// Where `cargo xtask test` unpacks the package.
const TREE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools/coturn");
/// Wording of a verdict by the part of the destination that the behaviour depends on.
const WORDS: [(&str, Dependence); 3] = [
    ("Endpoint Independent", Dependence::EndpointIndependent),
    ("Address Dependent", Dependence::AddressDependent),
    (
        "Address and Port Dependent",
        Dependence::AddressAndPortDependent,
    ),
];

/// The program `turnutils_natdiscovery`.
#[derive(Clone, Debug)]
pub struct NatDiscovery {
    program: PathBuf,
    libraries: PathBuf,
}

impl NatDiscovery {
    /// Returns the program that `cargo xtask test` unpacked; `None`: it could not.
    pub fn find() -> Option<Self> {
        let tree = Path::new(TREE);
        let program = tree.join("usr/bin/turnutils_natdiscovery");
        let folder = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        program.is_file().then(|| Self {
            program,
            libraries: tree.join(folder),
        })
    }

    /// Has the program ask a server with two addresses and ports, from one address in a namespace, and
    /// returns its verdicts. It sends each request once and waits 3 s for a response, so a verdict of
    /// this kind by a loaded machine may be too strict.
    ///
    /// Its test of hairpinning sends from one port to another that has sent to nobody but the server,
    /// so it finds hairpinning only where filtering is endpoint-independent.
    ///
    /// # Errors
    /// The program fails, or its output has no verdict.
    pub fn behaviour(&self, ns: &NetNs, own: IpAddr, server: SocketAddr) -> Result<Behaviour> {
        let mut command = Command::new(&self.program);
        command
            .env("LD_LIBRARY_PATH", &self.libraries)
            .args(["-m", "-f", "-H", "-L", &own.to_string()])
            .args(["-p", &server.port().to_string(), &server.ip().to_string()]);
        let said = ns.output(command)?.stdout;
        parse(&String::from_utf8_lossy(&said))
    }
}

/// Verdicts in the program's output.
fn parse(said: &str) -> Result<Behaviour> {
    let verdict = |of: &str| {
        let found = WORDS
            .iter()
            .find(|(words, _)| said.contains(&format!("NAT with {words} {of}!")));
        found
            .map(|(_, dependence)| *dependence)
            .ok_or_else(|| Error::unexpected(format!("no verdict about {of}: {said}")))
    };
    Ok(Behaviour {
        mapping: verdict("Mapping")?,
        filtering: verdict("Filtering")?,
        hairpinning: said.contains("successful hairpinning"),
    })
}

#[cfg(test)]
#[path = "nat_discovery_test.rs"]
mod tests;
