//! `slipgate why`: the rule that decides about a destination, and the outcome.
use std::{
    net::{IpAddr, Ipv4Addr, ToSocketAddrs as _},
    num::NonZeroU16,
    process::ExitCode,
};

use anyhow::bail;
use slipgate_abi::Protocol;
use slipgate_ipc::{
    client::{ClientAnswer, Target},
    engine::{EngineReply, EngineRequest, FlowQuestion, WhyAnswer},
};
use slipgate_policy::{NamePattern, document::ConfigError, one_line, tools::host_and_port, wire};

use super::print_once;
use crate::{
    args::WhyArgs,
    brokers::{ANOTHER_ANSWER, ask_each, of_engine},
};

/// For scripts: the flow would be refused. 1 is an error, 2 a command line that can't be used.
const EXIT_REFUSED: u8 = 3;

/// Runs the command `slipgate why`.
pub(crate) fn run(args: &WhyArgs) -> anyhow::Result<ExitCode> {
    let protocol = Protocol::from(args.proto);
    let (host, port) = destination(&args.destination, protocol)?;
    let mut question = FlowQuestion {
        address: Ipv4Addr::UNSPECIFIED.into(),
        port,
        protocol: protocol as u8,
        name: None,
    };
    match host {
        Host::Address(address) => question.address = address,
        Host::Name(name) => question.name = Some(name),
    }
    let mut answer = ask(args, question.clone())?;
    // Only now, for this host's resolvers need not be the guest's, nor answer.
    if answer.lacks_address
        && let Some(address) = question.name.as_deref().and_then(address_of)
    {
        question.address = address;
        answer = ask(args, question)?;
    }
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
    if !answer.rule.is_empty() {
        text.push_str(&format!("rule:    {}\n", one_line(&answer.rule)));
    }
    if let Some(refusal) = &answer.refusal {
        text.push_str(&format!("refusal: {}\n", one_line(refusal)));
    }
    if let Some(via) = &answer.via {
        text.push_str(&format!("via:     {}\n", one_line(via)));
    }
    text
}

/// Several brokers may serve VMs here; the one that serves this VM answers.
fn ask(args: &WhyArgs, question: FlowQuestion) -> anyhow::Result<WhyAnswer> {
    let request = of_engine(Target::Vm(args.vm.clone()), EngineRequest::Why(question));
    match ask_each(&args.pin_dir, &request)? {
        Ok(ClientAnswer::Engine {
            reply: EngineReply::Why(answer),
        }) => Ok(answer),
        Ok(_) => bail!(ANOTHER_ANSWER),
        Err(asked) => Err(asked.error(&args.vm)),
    }
}

/// Destination of the flow in question.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Host {
    Address(IpAddr),
    /// Judged by its name, and by an address only if no rule names it.
    Name(String),
}

/// `HOST:PORT`, or `HOST` for ICMP. An IPv6 address with a port stands in brackets.
fn destination(text: &str, protocol: Protocol) -> Result<(Host, u16), ConfigError> {
    let wrong = |problem: &str| {
        let remedy = "give HOST:PORT ([HOST]:PORT with IPv6), or HOST with --proto icmp";
        ConfigError::new("DESTINATION", text, problem, remedy)
    };
    if text.contains("://") {
        return Err(wrong("a URL is none: leave the scheme out"));
    }
    let wants_port = protocol != Protocol::Icmp;
    let (host, port) = host_and_port(text);
    let port = match port.filter(|_| wants_port).map(str::parse::<NonZeroU16>) {
        None if wants_port => return Err(wrong("no port")),
        None => 0,
        Some(Ok(port)) => port.get(),
        Some(Err(_)) => return Err(wrong("the port is not one of 1 to 65535")),
    };
    if NamePattern::is_meant_by(host) {
        wire(host).map_err(|e| wrong(&e.to_string()))?;
        return Ok((Host::Name(host.to_owned()), port));
    }
    match host.parse() {
        Ok(address) => Ok((Host::Address(address), port)),
        Err(_) => Err(wrong("the host is neither an address nor a name")),
    }
}

/// Returns the first IPv4 address that this host finds for a name.
fn address_of(name: &str) -> Option<IpAddr> {
    let found = (name, 0).to_socket_addrs().ok()?;
    let mut found = found.map(|address| address.ip());
    found.find(IpAddr::is_ipv4)
}

#[cfg(test)]
#[path = "why_test.rs"]
mod tests;
