//! The channel to the broker as the engine's loop has it.
use std::{
    fs::File,
    io,
    net::{SocketAddr, SocketAddrV4},
    os::fd::{AsFd, BorrowedFd},
    rc::Rc,
};

use slipgate_abi::Protocol;
use slipgate_policy::Destination;
use userspace_nat::{
    clock::SECOND_NS,
    engine::{CaptureRequest, Control, ControlMessage, ControlReply, Reload, Why},
};

use crate::channel::{Channel, NetworkView, Policies, Received, ToBroker, ToEngine, WhyAnswer};

/// Most of a text in an answer, bytes of JSON; an answer has a few.
const TEXT_BYTES: usize = 8 * 1_024;

/// Our end of the channel.
#[derive(Debug)]
pub(super) struct BrokerChannel {
    channel: Rc<Channel>,
}

impl BrokerChannel {
    pub(super) fn new(channel: Rc<Channel>) -> Self {
        Self { channel }
    }
}

impl Control for BrokerChannel {
    fn recv(&mut self) -> io::Result<Option<ControlMessage>> {
        loop {
            match self
                .channel
                .try_receive::<ToEngine>()
                .map_err(io::Error::other)?
            {
                Received::Nothing => return Ok(None),
                Received::End => return Err(io::ErrorKind::UnexpectedEof.into()),
                Received::Message(ToEngine::FlowLog, mut fds) => {
                    if let Some(file) = fds.pop().map(File::from) {
                        let writer: Box<dyn io::Write + Send> = Box::new(file);
                        return Ok(Some(ControlMessage::FlowLog(Some(writer))));
                    }
                }
                Received::Message(ToEngine::Policies(policies), _) => {
                    return reload(*policies).map(Some);
                }
                Received::Message(ToEngine::Pcap, mut fds) => {
                    if let Some(file) = fds.pop().map(File::from) {
                        return Ok(Some(ControlMessage::Pcap(Box::new(file))));
                    }
                }
                Received::Message(
                    ToEngine::Capture {
                        request,
                        what: subject,
                        packets,
                        seconds,
                    },
                    mut fds,
                ) => {
                    if let Some(to) = fds.pop() {
                        let lasts_ns = seconds.map(|s| s.saturating_mul(SECOND_NS));
                        let capture = CaptureRequest {
                            subject,
                            to,
                            packets,
                            lasts_ns,
                        };
                        return Ok(Some(ControlMessage::Capture { request, capture }));
                    }
                }
                Received::Message(ToEngine::Listen { request, row }, mut fds) => {
                    if let Some(to) = fds.pop() {
                        return Ok(Some(ControlMessage::Listen { request, row, to }));
                    }
                }
                Received::Message(message, _) => {
                    if let Some(message) = translate(message) {
                        return Ok(Some(message));
                    }
                }
            }
        }
    }

    fn send(&mut self, reply: ControlReply) -> io::Result<()> {
        let message = match reply {
            ControlReply::Why { request, answer } => ToBroker::Why {
                request,
                answer: why(answer),
            },
            ControlReply::Names { request, page } => ToBroker::Names { request, page },
            ControlReply::Applied {
                request,
                cut,
                kept,
                left,
            } => ToBroker::Applied {
                request,
                cut,
                kept,
                left,
            },
            ControlReply::Cut { request, flows } => ToBroker::Cut { request, flows },
            ControlReply::Capturing { request, refused } => ToBroker::Capturing {
                request,
                refused: refused.map(|why| why.to_string()),
            },
            ControlReply::Listening { request, refused } => ToBroker::Listening {
                request,
                refused: refused.map(|why| why.to_string()),
            },
            ControlReply::Thawed { request } => ToBroker::Thawed { request },
            ControlReply::Synced { request, .. } => ToBroker::Answered { request },
        };
        self.channel.send(&message, &[]).map_err(io::Error::other)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.channel.as_fd())
    }
}

/// `None`: a message of the start, or a question that makes no sense.
fn translate(message: ToEngine) -> Option<ControlMessage> {
    Some(match message {
        ToEngine::Vm(spec) => ControlMessage::Vm(spec),
        ToEngine::Network(view) => routes(view),
        ToEngine::Resolvers(all) => resolvers(all),
        ToEngine::ReservedPorts(ports) => reserved(ports),
        ToEngine::Why {
            request,
            row,
            address,
            port,
            protocol,
            name,
        } => ControlMessage::Why {
            request,
            row,
            name,
            to: Destination {
                addr: address,
                port,
                protocol: Protocol::from_ip(protocol)?,
            },
        },
        ToEngine::Names { request, from } => ControlMessage::Names { request, from },
        ToEngine::Cut { request, what } => ControlMessage::Cut { request, what },
        ToEngine::Thaw { request, row } => ControlMessage::Thaw { request, row },
        ToEngine::Ping { request } => ControlMessage::Sync { request },
        ToEngine::Shutdown(exit) => ControlMessage::Shutdown(exit),
        ToEngine::Start(_)
        | ToEngine::Forwards(_)
        | ToEngine::Begin
        | ToEngine::FlowLog
        | ToEngine::Pcap
        | ToEngine::Policies(_)
        | ToEngine::Capture { .. }
        | ToEngine::Listen { .. } => return None,
    })
}

/// The broker has compiled them before: an error is its fault.
fn reload(policies: Policies) -> io::Result<ControlMessage> {
    Ok(ControlMessage::Policies(Box::new(Reload {
        request: policies.request,
        policies: policies.policies.compile().map_err(io::Error::other)?,
        rule_base: policies.rule_base,
        local: policies.local,
        vms: policies.vms,
        strictly: policies.strictly,
    })))
}

pub(super) fn routes(view: NetworkView) -> ControlMessage {
    ControlMessage::Routes {
        routes: view.routes,
        local: view.local,
        links: view.links,
    }
}

pub(super) fn resolvers(all: Vec<SocketAddrV4>) -> ControlMessage {
    ControlMessage::Resolvers(all.into_iter().map(SocketAddr::V4).collect())
}

pub(super) fn reserved(ports: Vec<(u8, u16)>) -> ControlMessage {
    let known = |(protocol, port)| Some((Protocol::from_ip(protocol)?, port));
    ControlMessage::ReservedPorts(ports.into_iter().filter_map(known).collect())
}

/// A packet has room for each of its texts, whatever rules and names are in them.
fn why(answer: Why) -> WhyAnswer {
    WhyAnswer {
        admitted: answer.admitted,
        rule: cut(answer.rule),
        refusal: answer.refusal,
        outcome: cut(answer.outcome),
        explanation: cut(answer.explanation),
        via: answer.via,
        lacks_address: answer.lacks_address,
    }
}

/// The beginning of a text, of [`TEXT_BYTES`] at most as JSON.
fn cut(mut text: String) -> String {
    const MARK: &str = " ...";
    let mut bytes = 0;
    let mut fits = 0;
    for (at, char) in text.char_indices() {
        bytes += match char {
            '"' | '\\' => 2,
            '\0'..='\x1f' => 6,
            char => char.len_utf8(),
        };
        if bytes > TEXT_BYTES {
            text.truncate(fits);
            text.push_str(MARK);
            break;
        }
        if bytes <= TEXT_BYTES - MARK.len() {
            fits = at + char.len_utf8();
        }
    }
    text
}

#[cfg(test)]
#[path = "control_test.rs"]
mod tests;
