//! The channel to the broker as the engine's loop has it.
use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
    rc::Rc,
};

use slipgate_abi::{Protocol, VmId, VmRow};
use slipgate_ipc::{
    channel::{Channel, Received, read_memory_file},
    engine::{EngineReply, EngineRequest, FromEngine, Policies, Subject, ToEngine, WhyAnswer},
};
use slipgate_policy::{Destination, PolicySet};
use userspace_nat::{
    clock::SECOND_NS,
    control::{Control, ControlMessage, ControlReply, Reload, Why},
    observe::CaptureRequest,
};

use super::convert;

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

    fn reply(&self, message: FromEngine) -> io::Result<()> {
        self.channel.send(message).map_err(io::Error::other)
    }
}

impl Control for BrokerChannel {
    fn recv(&mut self) -> io::Result<Option<ControlMessage>> {
        loop {
            let message = match self.channel.try_receive().map_err(io::Error::other)? {
                Received::Nothing => return Ok(None),
                Received::End => return Err(io::ErrorKind::UnexpectedEof.into()),
                Received::Message(message) => message,
            };
            let message = match message {
                ToEngine::Request { id, about, request } => match asked(id, about, request) {
                    Ok(message) => message,
                    Err(why) => {
                        let reply = EngineReply::Refused { why };
                        self.reply(FromEngine::Reply { id, reply })?;
                        continue;
                    }
                },
                ToEngine::Vm(spec) => ControlMessage::Vm(convert::vm(spec)),
                ToEngine::Network(view) => convert::network(view),
                ToEngine::Resolvers(all) => convert::resolvers(all),
                ToEngine::ReservedPorts(ports) => convert::reserved(ports),
                ToEngine::FlowLog(file) => {
                    ControlMessage::FlowLog(Some(Box::new(File::from(file))))
                }
                ToEngine::Pcap(file) => ControlMessage::Pcap(Box::new(File::from(file))),
                ToEngine::Policies(policies) => reload(*policies)?,
                ToEngine::Ping { id } => ControlMessage::Sync { request: id },
                ToEngine::Shutdown(exit) => ControlMessage::Shutdown(convert::on_exit(exit)),
                // Of the start, which is over.
                ToEngine::Start(_) | ToEngine::Forwards(_) | ToEngine::Begin => continue,
            };
            return Ok(Some(message));
        }
    }

    fn send(&mut self, reply: ControlReply) -> io::Result<()> {
        let done = |refused: Option<String>| match refused {
            None => EngineReply::Done,
            Some(why) => EngineReply::Refused { why },
        };
        let (id, reply) = match reply {
            ControlReply::Applied {
                request,
                cut,
                kept,
                left,
            } => {
                return self.reply(FromEngine::Applied {
                    id: request,
                    cut,
                    kept,
                    left,
                });
            }
            ControlReply::Synced { request, .. } => {
                return self.reply(FromEngine::Pong { id: request });
            }
            ControlReply::Why { request, answer } => (request, EngineReply::Why(why(answer))),
            ControlReply::Names { request, page } => {
                (request, EngineReply::Inventory(convert::inventory(page)))
            }
            ControlReply::Cut { request, flows } => {
                let cut = flows.map(|flows| EngineReply::Cut { flows });
                (request, cut.unwrap_or(EngineReply::UnknownFlow))
            }
            ControlReply::Capturing { request, refused } => {
                (request, done(refused.map(|why| why.to_string())))
            }
            ControlReply::Listening { request, refused } => {
                (request, done(refused.map(|why| why.to_string())))
            }
            ControlReply::Thawed { request } => (request, EngineReply::Done),
        };
        self.reply(FromEngine::Reply { id, reply })
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.channel.as_fd())
    }
}

/// A request as the engine has it; or why it makes no sense.
fn asked(
    request: u64,
    about: Option<Subject>,
    asked: EngineRequest,
) -> Result<ControlMessage, String> {
    let vm = || match about {
        Some(Subject::Vm { row }) => Ok(VmRow::new(row)),
        _ => Err("that is asked of a VM"),
    };
    let flows = || about.map(convert::subject).ok_or("that is asked of flows");
    Ok(match asked {
        EngineRequest::Why(question) => ControlMessage::Why {
            request,
            row: vm()?,
            name: question.name,
            to: Destination {
                addr: question.address,
                port: question.port,
                protocol: Protocol::from_ip(question.protocol)
                    .ok_or_else(|| format!("IP protocol {} has no flows", question.protocol))?,
            },
        },
        EngineRequest::Inventory { from } => ControlMessage::Names { request, from },
        EngineRequest::Thaw => ControlMessage::Thaw {
            request,
            row: vm()?,
        },
        EngineRequest::Cut => ControlMessage::Cut {
            request,
            what: flows()?,
        },
        EngineRequest::Capture {
            to,
            packets,
            seconds,
        } => ControlMessage::Capture {
            request,
            capture: CaptureRequest {
                subject: flows()?,
                to,
                packets,
                lasts_ns: seconds.map(|s| s.saturating_mul(SECOND_NS)),
            },
        },
        EngineRequest::Record { to } => ControlMessage::Listen {
            request,
            row: vm()?,
            to,
        },
    })
}

/// Converts policies that the broker compiled; an error is the broker's fault.
fn reload(policies: Policies) -> io::Result<ControlMessage> {
    let bytes = read_memory_file(policies.policies).map_err(io::Error::other)?;
    Ok(ControlMessage::Policies(Box::new(Reload {
        request: policies.id,
        policies: PolicySet::from_bytes(&bytes).map_err(io::Error::other)?,
        rule_base: policies.rule_base,
        local: policies.local,
        vms: convert::vms(policies.vms),
        strictly: policies.strictly.into_iter().map(VmId::new).collect(),
    })))
}

/// A packet has room for each of its texts, whatever rules and names are in them.
fn why(answer: Why) -> WhyAnswer {
    WhyAnswer {
        admitted: answer.admitted,
        rule: truncate_json(answer.rule),
        refusal: answer.refusal,
        outcome: truncate_json(answer.outcome),
        explanation: truncate_json(answer.explanation),
        via: answer.via,
        lacks_address: answer.lacks_address,
    }
}

/// The beginning of a text, of [`TEXT_BYTES`] at most as JSON.
fn truncate_json(mut text: String) -> String {
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
