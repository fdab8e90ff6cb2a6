//! A microVM with the built-in guest and two vCPUs, under `slipgate run`: in hybrid mode with two queue
//! pairs, in user mode with one, and by a user without privileges.
mod port;
mod report;

use std::{collections::HashMap, time::Duration};

use serde_json::Value;
use slipgate_testbed::{
    Error, Line, MicroVm, MicroVmEnd, OrdinaryUser, PinDir, Result, World,
    servers::{Answer, DnsServer, HttpServer, TcpServer, TcpService, Zone},
    slipgate::FlowRow,
    world::{HOST, SERVER, SERVER_2, UPLINK},
};

use self::port::{Carried, Watched};
use crate::progress::{Progress, bytes, grouped};

/// The name that the guest looks up.
const NAME: &str = "www.example.test";
/// Number of look-ups: the first is sent upstream, the others are answered from the cache.
const LOOK_UPS: usize = 6;
const VM: &str = "demo";
/// The rule under which one server is out of reach.
const DENIED: &str = "203.0.113.20";
const CONNECTIONS: u64 = 2_000;
/// Bytes on each of two connections.
const STREAM_BYTES: u64 = 128 << 20;
/// A pause in which counters are read.
const PAUSE: &str = "wait 300";
const WAIT: Duration = Duration::from_secs(60);

/// Observations of the run.
struct Seen {
    lines: Lines,
    /// Output of `slipgate stats` between the guest's workloads.
    before_connections: Value,
    after_connections: Value,
    after_streams: Value,
    /// Flows during the upload.
    flows: Vec<FlowRow>,
    why_denied: String,
    /// In hybrid mode: frames that the engine port had carried before the streams, and after them.
    port: Option<(u64, Carried)>,
    end: MicroVmEnd,
    /// TAPs, ports and pins that are left, or tables.
    left: Vec<String>,
}

/// Who runs the microVM.
enum By {
    /// Root, in hybrid mode.
    Root(PinDir),
    /// A user, in user mode.
    User(OrdinaryUser),
}

impl By {
    /// Queue pairs of the guest's network card.
    fn pairs(&self) -> usize {
        match self {
            Self::Root(_) => 2,
            Self::User(_) => 1,
        }
    }
}

/// Output of the guest, by workload.
struct Lines {
    boot: Line,
    lease: Value,
    dns: Vec<Value>,
    ping: Value,
    connections: Value,
    up: Value,
    down: Value,
}

pub(crate) fn run_hybrid(progress: &mut Progress) -> Result<()> {
    progress.title("slipgate: a microVM, its NAT, and what became of each packet");
    run(By::Root(PinDir::new()?), progress)
}

pub(crate) fn run_userspace(progress: &mut Progress) -> Result<()> {
    progress.title("slipgate without root: a microVM, its engine, and what became of each packet");
    run(By::User(OrdinaryUser::new()?), progress)
}

fn run(by: By, progress: &mut Progress) -> Result<()> {
    let world = World::new()?;
    let zone = Zone::from([(NAME.to_owned(), Answer::a(SERVER, 60))]);
    let names = DnsServer::start(&world.net, (SERVER, 53), zone)?;
    let pages = HashMap::from([("/".to_owned(), b"Hello from the world.\n".to_vec())]);
    let _web = HttpServer::start(&world.net, (SERVER, 80), pages)?;
    let close = TcpServer::start(&world.net, (SERVER, 7001), TcpService::Close)?;
    let streams = TcpServer::start(&world.net, (SERVER, 7000), TcpService::Streams)?;
    let _denied = TcpServer::start(&world.net, (SERVER_2, 443), TcpService::Close)?;
    progress.step(
        "world",
        &format!("host {HOST}, servers {SERVER} and {SERVER_2}"),
    );

    let resolver = names.address().to_string();
    let work = [
        vec![format!("dns {NAME}"); LOOK_UPS].join("; "),
        // smoltcp asks for one neighbour a second: the resolver's turn was just now.
        "wait 1000".to_owned(),
        format!("ping {SERVER} 3"),
        PAUSE.to_owned(),
        format!("crr {} {CONNECTIONS} x2 close", close.address()),
        PAUSE.to_owned(),
        format!("stream {} {STREAM_BYTES} up x2", streams.address()),
        format!("stream {} {STREAM_BYTES} down x2", streams.address()),
        PAUSE.to_owned(),
    ]
    .join("; ");
    let flags = [
        "--name",
        VM,
        "--cpus",
        "2",
        "--queues",
        &by.pairs().to_string(),
        "--uplink",
        UPLINK,
        "--dns",
        &resolver,
        "--deny",
        DENIED,
        "--cmdline",
        &work,
    ];
    let (vm, port) = match &by {
        By::Root(pins) => (
            MicroVm::start(&world.host, pins, &flags)?,
            Some(Watched::start(&world)?),
        ),
        By::User(user) => {
            // As most distributions have it.
            world
                .host
                .sysctl("net.ipv4.ping_group_range", &user.ping_groups())?;
            (MicroVm::start_by(&world.host, user, &flags)?, None)
        }
    };
    let seen = watch(vm, port.as_ref(), &world, &by, progress)?;
    report::print(&seen, &by, names.udp_queries(NAME), progress);
    Ok(())
}

/// Follows the guest's console to its end.
fn watch(
    mut vm: MicroVm,
    port: Option<&Watched>,
    world: &World,
    by: &By,
    progress: &mut Progress,
) -> Result<Seen> {
    let stats = |vm: &MicroVm| -> Result<Value> {
        let shown = vm.run(&["stats", "--json"])?.stdout;
        parse(&String::from_utf8_lossy(&shown))
    };
    let boot = vm.await_line("\"boot\":true", WAIT)?;
    progress.step(
        "boot",
        &format!("the guest is up {:.0} ms after the command", ms(boot.after)),
    );
    let said = |vm: &mut MicroVm, workload: &str| -> Result<Value> {
        let line = vm.await_line(&format!("\"workload\":\"{workload}\""), WAIT)?;
        parse(&line.text)
    };
    let lease = said(&mut vm, "lease")?;
    progress.step("DHCP", lease["address"].as_str().unwrap_or("no address"));
    let dns = (0..LOOK_UPS).map(|_| said(&mut vm, "dns"));
    let dns = dns.collect::<Result<Vec<_>>>()?;
    let ping = said(&mut vm, "ping")?;
    progress.step("DNS, ping", &format!("{NAME} is {}", dns[0]["addresses"]));
    let before_connections = stats(&vm)?;
    let connections = said(&mut vm, "crr")?;
    let done = connections["done"].as_u64().unwrap_or(0);
    progress.step(
        "connections",
        &format!("{} opened and closed", grouped(done)),
    );
    let after_connections = stats(&vm)?;
    let carried = || port.map(|port| port.carried(&world.host)).transpose();
    let before_streams = carried()?.map(|carried| carried.frames());
    let why_denied = vm.run(&["why", VM, &format!("{DENIED}:443")])?.stdout;
    let flows = flows_of_the_upload(&vm)?;
    let up = said(&mut vm, "stream")?;
    progress.step("upload", &rate(&up));
    let down = said(&mut vm, "stream")?;
    progress.step("download", &rate(&down));
    let after_streams = stats(&vm)?;
    let after = carried()?;
    let end = vm.finish(WAIT)?;
    progress.step(
        "end",
        &format!("{}, after {:.1} s", end.status, end.after.as_secs_f64()),
    );
    let links = world.host.ip("-brief link")?;
    let ours = |line: &&str| line.starts_with("sgvm") || line.starts_with("sgport");
    let left = links.lines().filter(ours).map(str::to_owned);
    let kept: Vec<String> = match by {
        By::Root(pins) => pins
            .pins()
            .iter()
            .map(|pin| pin.display().to_string())
            .collect(),
        By::User(user) if user.has_nothing_left() => Vec::new(),
        By::User(_) => vec!["tables of the user's".into()],
    };
    let left = left.chain(kept);
    Ok(Seen {
        lines: Lines {
            boot,
            lease,
            dns,
            ping,
            connections,
            up,
            down,
        },
        before_connections,
        after_connections,
        after_streams,
        flows,
        port: before_streams.zip(after),
        why_denied: String::from_utf8_lossy(&why_denied).trim().to_owned(),
        end,
        left: left.collect(),
    })
}

/// The flow table in the midst of the upload.
fn flows_of_the_upload(vm: &MicroVm) -> Result<Vec<FlowRow>> {
    let deadline = std::time::Instant::now() + WAIT;
    while std::time::Instant::now() < deadline {
        let shown = vm.run(&["flows", "--json"])?.stdout;
        let flows: Vec<FlowRow> = serde_json::from_slice(&shown)
            .map_err(|error| Error::unexpected(format!("`slipgate flows --json`: {error}")))?;
        if flows.iter().any(|flow| flow.tx_bytes > STREAM_BYTES / 8) {
            return Ok(flows);
        }
    }
    Err(Error::unexpected(
        "`slipgate flows` never showed the upload",
    ))
}

fn parse(json: &str) -> Result<Value> {
    serde_json::from_str(json).map_err(|error| Error::unexpected(format!("{json}: {error}")))
}

fn rate(stream: &Value) -> String {
    format!(
        "{} in {:.2} s, {:.2} Gb/s, each byte checked",
        bytes(number(&stream["bytes"])),
        stream["took_us"].as_f64().unwrap_or(0.0) / 1e6,
        stream["gbit_per_s"].as_f64().unwrap_or(0.0),
    )
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
