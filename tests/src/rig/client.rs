//! A stock Linux client: Debian's kernel, Debian's busybox and its DHCP client, resolver, `wget`
//! and `nc`, run by a script of checks.
//!
//! It prints a line for each check on its console, so it needs no other output device.

use std::{
    collections::HashMap,
    fmt::Write,
    net::{Ipv4Addr, Ipv6Addr},
};

use sha2::{Digest, Sha256};

use super::{Initramfs, Kernel};
use crate::{
    dns_wire::{Record, types},
    error::Result,
    pattern::Pattern,
    servers::{Answer, DnsServer, HttpServer, TcpServer, TcpService, Zone},
    streams::hexadecimal,
    world::{SERVER, SERVER_2, World},
    world_ipv6::{SERVER6, SERVER6_2},
};

const SCRIPT: &str = include_str!("client_init.sh");
/// A network card on PCI.
const MODULES: [&str; 2] = ["virtio_pci", "virtio_net"];

/// Settings of the client.
#[derive(Clone, Debug)]
pub struct Client {
    /// Number of its CPUs, and of its card's queue pairs.
    pub cpus: u8,
    /// `ADDRESS/PREFIX via ROUTER dns RESOLVER mtu BYTES` as the lease must be.
    pub lease: String,
    /// Server that answers pings and serves HTTP and digests.
    pub server: Ipv4Addr,
    /// A name of the server.
    pub name: String,
    /// Port that serves [`Client::HELLO`] at `/hello` and [`Client::blob`] at `/blob`.
    pub http_port: u16,
    /// Port of the server's [`crate::servers::TcpService::Digest`].
    pub digest_port: u16,
    /// A server that policy denies, listening on the HTTP port too.
    pub denied: Ipv4Addr,
    /// Prefix, of 64 bits, in which the client makes itself an IPv6 address.
    pub prefix6: String,
    /// Server that answers pings and serves HTTP by IPv6.
    pub server6: Ipv6Addr,
    /// A name of the server that has an IPv6 address alone.
    pub name6: String,
    /// A server that policy denies by IPv6, listening on the HTTP port too.
    pub denied6: Ipv6Addr,
    /// Bytes per stream, a multiple of 64 KiB.
    pub stream_bytes: u32,
}

impl Client {
    /// Two CPUs behind slipgate's own defaults, and the world's servers.
    pub fn new() -> Self {
        Client {
            cpus: 2,
            lease: "10.0.2.15/24 via 10.0.2.2 dns 10.0.2.3 mtu 1500".into(),
            server: SERVER,
            name: "www.example.test".into(),
            http_port: 80,
            digest_port: 81,
            denied: SERVER_2,
            prefix6: "fd73:6c69:7067:".into(),
            server6: SERVER6,
            name6: "six.example.test".into(),
            denied6: SERVER6_2,
            stream_bytes: 8 << 20,
        }
    }

    /// Flags of slipgate besides the TAP and the uplink.
    pub fn nat_flags(&self) -> Vec<String> {
        let (resolver, denied) = (self.server.to_string(), self.denied.to_string());
        let denied6 = self.denied6.to_string();
        let flags = [
            "--ipv6", "nat", "--dns", &resolver, "--deny", &denied, "--deny", &denied6,
        ];
        flags.map(str::to_owned).to_vec()
    }

    /// Text of the page `/hello`.
    pub const HELLO: &str = "good day";

    /// Returns the file to download. It is not compressible, and no two parts of it are equal.
    pub fn blob(&self) -> Vec<u8> {
        let mut blob = vec![0; self.stream_bytes as usize];
        Pattern::new(u64::from(self.stream_bytes)).fill(&mut blob);
        blob
    }

    /// Makes the initramfs that boots the client.
    ///
    /// # Errors
    /// There is no busybox here, or a module of the kernel cannot be read.
    pub fn initramfs(&self, kernel: &Kernel) -> Result<Vec<u8>> {
        let mut initramfs = Initramfs::of_a_guest(SCRIPT)?;
        initramfs.modules(kernel, &MODULES)?;
        initramfs.file("/plan", self.plan().as_bytes());
        initramfs.file("/etc/hostname", b"client\n");
        Ok(initramfs.finish())
    }

    /// Starts the servers for the client, and gives the world IPv6.
    ///
    /// # Errors
    /// An address can't be added, or a server can't listen.
    pub fn serve(&self, world: &World) -> Result<ClientServers> {
        let net = &world.net;
        world.give_ipv6()?;
        let address6 = Record::new(types::AAAA, self.server6.octets().to_vec(), 60);
        let zone = Zone::from([
            (self.name.clone(), Answer::a(self.server, 60)),
            (self.name6.clone(), Answer::records(vec![address6])),
        ]);
        let pages = HashMap::from([
            ("/hello".to_owned(), Self::HELLO.into()),
            ("/blob".to_owned(), self.blob()),
        ]);
        let (digest, denied) = (
            (self.server, self.digest_port),
            (self.denied, self.http_port),
        );
        Ok(ClientServers {
            _names: DnsServer::start(net, (self.server, 53), zone)?,
            _pages6: HttpServer::start(net, (self.server6, self.http_port), pages.clone())?,
            _denied6: HttpServer::start(net, (self.denied6, self.http_port), pages.clone())?,
            _pages: HttpServer::start(net, (self.server, self.http_port), pages)?,
            _digests: TcpServer::start(net, digest, TcpService::Digest)?,
            _denied: TcpServer::start(net, denied, TcpService::Hold)?,
        })
    }

    pub(super) fn plan(&self) -> String {
        let mut plan = String::new();
        let mut set = |name: &str, value: &dyn std::fmt::Display| {
            let _ = writeln!(plan, "{name}='{value}'");
        };
        set("CPUS", &self.cpus);
        set("LEASE", &self.lease);
        set("SERVER", &self.server);
        set("NAME", &self.name);
        set("HTTP_PORT", &self.http_port);
        set("DIGEST_PORT", &self.digest_port);
        set("DENIED", &self.denied);
        set("PREFIX6", &self.prefix6);
        set("SERVER6", &self.server6);
        set("NAME6", &self.name6);
        set("DENIED6", &self.denied6);
        set("HELLO", &Self::HELLO);
        set("BLOB", &hexadecimal(&Sha256::digest(self.blob())));
        plan
    }
}

impl Default for Client {
    fn default() -> Self {
        Self::new()
    }
}

/// Servers that run until this is dropped.
pub struct ClientServers {
    _names: DnsServer,
    _pages: HttpServer,
    _pages6: HttpServer,
    _denied6: HttpServer,
    _digests: TcpServer,
    _denied: TcpServer,
}

/// Results that the client printed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientReport {
    /// Names of the passed checks, with the observations.
    pub ok: Vec<String>,
    /// Names of the failed checks, with the observations.
    pub failed: Vec<String>,
    /// Whether the client ran to its end.
    pub ended: bool,
}

impl ClientReport {
    /// Number of checks that a client makes.
    pub const CHECKS: usize = 23;

    /// Reads the results from a console; the kernel's messages in between are skipped.
    pub fn read(console: &str) -> Self {
        let mut report = ClientReport::default();
        for line in console.lines().map(str::trim_end) {
            if let Some(what) = line.strip_prefix("ok ") {
                report.ok.push(what.to_owned());
            } else if let Some(why) = line.strip_prefix("FAILED ") {
                report.failed.push(why.to_owned());
            }
            report.ended |= line == "end";
        }
        report
    }

    /// Whether everything was tried and was as it should be.
    pub fn is_whole(&self) -> bool {
        self.ended && self.failed.is_empty() && self.ok.len() == Self::CHECKS
    }
}
