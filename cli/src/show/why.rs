//! `slipgate why`: which rule decides about a destination, and what would happen.
use std::{
    net::{Ipv4Addr, SocketAddr, ToSocketAddrs as _},
    process::ExitCode,
};

use anyhow::{Context as _, bail};
use slipgate_abi::Protocol;
use userspace_nat::rules::{NamePattern, wire};

use super::{plain::one_line, print_once, sockets};
use crate::{
    args::{Proto, WhyArgs},
    channel::{WhyAnswer, WhyQuestion},
    control::is_nobodys,
    control_socket::{Answer, Request, ask},
};

const NOBODY: &str =
    "no slipgate runs in this network namespace: start `slipgate attach` or `slipgate run`";
/// For scripts: the flow would be refused. 1 is an error, 2 a command line that can't be used.
const EXIT_REFUSED: u8 = 3;

/// Runs `slipgate why`.
pub(crate) fn run(args: &WhyArgs) -> anyhow::Result<ExitCode> {
    let protocol = match args.proto {
        Proto::Tcp => Protocol::Tcp,
        Proto::Udp => Protocol::Udp,
        Proto::Icmp => Protocol::Icmp,
    };
    let (address, port, name) = destination(&args.destination, protocol)?;
    let request = Request::Why(WhyQuestion {
        vm: args.vm.clone(),
        address,
        port,
        protocol: protocol as u8,
        name,
    });
    let answer = ask_all(args, &request)?;
    if args.json {
        print_once(&format!("{}\n", serde_json::to_string_pretty(&answer)?))?;
    } else {
        print_once(&text(&answer))?;
    }
    Ok(match answer.admitted {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_REFUSED),
    })
}

fn text(answer: &WhyAnswer) -> String {
    let verdict = if answer.admitted { "yes" } else { "no" };
    let mut text = format!("{verdict}: {}\n", one_line(&answer.outcome));
    for sentence in answer.explanation.lines() {
        text.push_str(&format!("  {sentence}\n"));
    }
    text.push_str(&format!("rule:    {}\n", one_line(&answer.rule)));
    if let Some(refusal) = &answer.refusal {
        text.push_str(&format!("refusal: {}\n", one_line(refusal)));
    }
    if let Some(via) = &answer.via {
        text.push_str(&format!("via:     {}\n", one_line(via)));
    }
    text
}

/// Several brokers may serve VMs here; the one that serves this VM answers.
fn ask_all(args: &WhyArgs, request: &Request) -> anyhow::Result<WhyAnswer> {
    let sockets = sockets(&args.pin_dir)?;
    if sockets.is_empty() {
        bail!(NOBODY);
    }
    let (mut others, mut errors) = (Vec::new(), Vec::new());
    for socket in sockets {
        match ask(&socket, request) {
            Ok(Answer::Why(answer)) => return Ok(answer),
            Ok(Answer::UnknownVm { served }) => others.extend(served),
            Ok(Answer::Error { error }) => errors.push(error),
            Ok(_) => errors.push("an answer to another question".into()),
            // One that was killed has left it.
            Err(e) if is_nobodys(&e) => {}
            Err(e) => errors.push(format!("{e:#}")),
        }
    }
    if !errors.is_empty() {
        bail!("{}", errors.join("; "));
    }
    if others.is_empty() {
        bail!(NOBODY);
    }
    others.sort();
    let names = others.join(", ");
    bail!("no VM {:?} is served; there is {names}", args.vm)
}

/// `HOST:PORT`, or `HOST` for ICMP. With a name comes the address that this host finds for it, or
/// 0.0.0.0: the engine judges the name, and the address only where no rule names it.
fn destination(text: &str, protocol: Protocol) -> anyhow::Result<(Ipv4Addr, u16, Option<String>)> {
    let wants_port = protocol != Protocol::Icmp;
    let with_port = if wants_port {
        text.to_owned()
    } else {
        let host = text.rsplit_once(':').map_or(text, |(host, _)| host);
        format!("{host}:0")
    };
    if !with_port.contains(':') {
        bail!("{text}: no port; give HOST:PORT, or --proto icmp");
    }
    let (host, port) = with_port.rsplit_once(':').unwrap_or((&with_port, ""));
    let name = NamePattern::is_meant_by(host).then(|| host.to_owned());
    if let Some(name) = &name {
        wire(name)?;
    }
    let port: u16 = port
        .parse()
        .with_context(|| format!("{text}: not HOST:PORT"))?;
    if wants_port && port == 0 {
        bail!("{text}: port 0 can't be connected to");
    }
    let found = match with_port.to_socket_addrs() {
        Ok(found) => found,
        Err(_) if name.is_some() => return Ok((Ipv4Addr::UNSPECIFIED, port, name)),
        Err(e) => {
            return Err(e).with_context(|| format!("{text}: not HOST:PORT, or no such host"));
        }
    };
    let address = found.into_iter().find_map(|address| match address {
        SocketAddr::V4(v4) => Some(*v4.ip()),
        SocketAddr::V6(_) => None,
    });
    match address {
        Some(address) => Ok((address, port, name)),
        None if name.is_some() => Ok((Ipv4Addr::UNSPECIFIED, port, name)),
        None => bail!("{text}: it has no IPv4 address, and IPv6 is not served yet"),
    }
}

#[cfg(test)]
#[path = "why_test.rs"]
mod tests;
