//! The channel to the broker as the engine's loop serves it: messages become calls of the engine's
//! methods, and what these return is sent back.
use std::{
    collections::HashMap,
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd},
    rc::Rc,
};

use slipgate_abi::{Protocol, VmId};
use slipgate_ipc::{
    channel::{Channel, Received, read_memory_file},
    engine::{
        EngineReply, EngineRequest, FlowQuestion, ForwardSocket, FromEngine, Policies, SleepChange,
        Subject, ToEngine, WhyAnswer,
    },
};
use slipgate_policy::{Destination, PolicySet};
use userspace_nat::{
    clock::{Clock, SECOND_NS},
    control::{ActivityChanges, Control, EndsToken, Forward, ForwardChange, Reload, Reloaded},
    datapath::Datapath,
    event_loop::Engine,
    observe::CaptureRequest,
    port::FrameIo,
    relay,
};

/// Most of a text in an answer, bytes of JSON; an answer has a few.
const TEXT_BYTES: usize = 8 * 1_024;

/// Our end of the channel.
#[derive(Debug)]
pub(super) struct BrokerChannel {
    channel: Rc<Channel>,
    /// Messages that are sent when flows have ended.
    pending: HashMap<EndsToken, FromEngine>,
}

impl BrokerChannel {
    pub(super) fn new(channel: Rc<Channel>) -> Self {
        Self {
            channel,
            pending: HashMap::new(),
        }
    }

    /// Sends a message, now or when the flows of a token have ended.
    fn send(&mut self, message: FromEngine, after: Option<EndsToken>) -> io::Result<()> {
        match after {
            Some(token) => {
                self.pending.insert(token, message);
                Ok(())
            }
            None => self.channel.send(message).map_err(io::Error::other),
        }
    }
}

impl<D: Datapath, P: FrameIo, C: Clock> Control<Engine<D, P, C>> for BrokerChannel {
    fn serve(&mut self, engine: &mut Engine<D, P, C>) -> io::Result<()> {
        loop {
            let message = match self.channel.try_receive().map_err(io::Error::other)? {
                Received::Nothing => return Ok(()),
                Received::End => return Err(io::ErrorKind::UnexpectedEof.into()),
                Received::Message(message) => message,
            };
            match message {
                ToEngine::Request { id, about, request } => {
                    let (reply, after) = answer(engine, about, request)
                        .unwrap_or_else(|why| (EngineReply::Refused { why }, None));
                    self.send(FromEngine::Reply { id, reply }, after)?;
                }
                ToEngine::Vm(spec) => engine.set_vm(spec),
                ToEngine::AddVm { id, vm } => {
                    engine.set_vm(vm);
                    self.send(FromEngine::Done { id }, None)?;
                }
                ToEngine::RemoveVm { id, vm, row } => {
                    engine.remove_vm(row, vm);
                    let ends = engine.after_ends();
                    self.send(FromEngine::Done { id }, Some(ends))?;
                }
                ToEngine::ChangeForwards {
                    id,
                    vm,
                    row,
                    removed,
                    added,
                } => {
                    let change = ForwardChange {
                        vm,
                        row,
                        removed: removed.into_iter().filter_map(known).collect(),
                        added: added.into_iter().filter_map(forward).collect(),
                    };
                    engine.change_forwards(change).map_err(io::Error::other)?;
                    let ends = engine.after_ends();
                    self.send(FromEngine::Done { id }, Some(ends))?;
                }
                ToEngine::Network(view) => engine.set_network(&view),
                ToEngine::Resolvers(all) => engine.set_resolvers(&all),
                ToEngine::ReservedPorts(ports) => engine.set_reserved_ports(known_ports(ports)),
                ToEngine::FlowLog(file) => engine.set_flow_log(File::from(file)),
                ToEngine::Pcap(file) => engine.set_pcap_file(Box::new(File::from(file))),
                ToEngine::Events(stream) => {
                    if let Err(why) = engine.send_events(stream) {
                        tracing::warn!("clients of the API get no events of flows: {why}");
                    }
                }
                ToEngine::Policies(policies) => engine.reload(reload(*policies)?),
                ToEngine::Ping { id } => {
                    let ends = engine.after_ends();
                    self.send(FromEngine::Pong { id }, Some(ends))?;
                }
                ToEngine::Shutdown(exit) => engine.stop(exit),
                // Of the start, which is over.
                ToEngine::Start(_) | ToEngine::Forwards(_) | ToEngine::Begin => {}
            }
        }
    }

    fn ended(&mut self, token: EndsToken) -> io::Result<()> {
        match self.pending.remove(&token) {
            Some(message) => self.send(message, None),
            None => Ok(()),
        }
    }

    fn reloaded(&mut self, reloaded: Reloaded) -> io::Result<()> {
        let Reloaded {
            id,
            cut,
            kept,
            left,
            ends,
        } = reloaded;
        let applied = FromEngine::Applied {
            id,
            cut,
            kept,
            left,
        };
        self.send(applied, Some(ends))
    }

    fn activity(&mut self, changes: ActivityChanges) -> io::Result<()> {
        let ActivityChanges { idle, busy } = changes;
        self.send(FromEngine::Activity { idle, busy }, None)
    }

    fn sleep_changes(&mut self, changes: Vec<(VmId, SleepChange)>) -> io::Result<()> {
        self.send(FromEngine::Sleep(changes), None)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.channel.as_fd())
    }
}

/// Carries out a client's request. Returns the reply, and the flows whose end it waits for; an error
/// is the reason why the request is refused.
fn answer<D: Datapath, P: FrameIo, C: Clock>(
    engine: &mut Engine<D, P, C>,
    about: Option<Subject>,
    request: EngineRequest,
) -> Result<(EngineReply, Option<EndsToken>), String> {
    let vm = || match about {
        Some(Subject::Vm { row }) => Ok(row),
        _ => Err("that is asked of a VM"),
    };
    let flows = || about.ok_or("that is asked of flows");
    let reply = match request {
        EngineRequest::Why(question) => {
            let to = destination(&question)?;
            let answer = engine.why(vm()?, to, question.name.as_deref());
            EngineReply::Why(truncate_texts(answer))
        }
        EngineRequest::Inventory { from } => EngineReply::Inventory(engine.inventory(from)),
        EngineRequest::Activity { from } => match engine.activity_of(vm()?, from) {
            Some(page) => EngineReply::Activity(page),
            None => return Err("its flows are being taken over: try again".into()),
        },
        EngineRequest::Thaw => {
            engine.thaw(vm()?);
            EngineReply::Done
        }
        EngineRequest::Sleep => {
            engine.sleep(vm()?);
            EngineReply::Done
        }
        EngineRequest::Resume => {
            if !engine.wake(vm()?) {
                return Err("its TAP is not there: have the VMM open it, and try again".into());
            }
            EngineReply::Done
        }
        EngineRequest::Cut => match engine.cut(flows()?) {
            Some(cut) => return Ok((EngineReply::Cut { flows: cut.flows }, Some(cut.ends))),
            None => EngineReply::UnknownFlow,
        },
        EngineRequest::EndGeneration => {
            let cut = engine.end_generation(vm()?);
            return Ok((EngineReply::Cut { flows: cut.flows }, Some(cut.ends)));
        }
        EngineRequest::Capture {
            to,
            packets,
            seconds,
        } => {
            let capture = CaptureRequest {
                subject: flows()?,
                to,
                packets,
                lasts_ns: seconds.map(|s| s.saturating_mul(SECOND_NS)),
            };
            engine.capture(capture).map_err(|why| why.to_string())?;
            EngineReply::Done
        }
        EngineRequest::Record { to } => {
            engine.listen(vm()?, to).map_err(|why| why.to_string())?;
            EngineReply::Done
        }
    };
    Ok((reply, None))
}

fn destination(question: &FlowQuestion) -> Result<Destination, String> {
    let protocol = Protocol::from_ip(question.protocol);
    Ok(Destination {
        addr: question.address,
        port: question.port,
        protocol: protocol
            .ok_or_else(|| format!("IP protocol {} has no flows", question.protocol))?,
    })
}

/// Those of the host's bound ports whose protocol is translated.
pub(super) fn known_ports(ports: Vec<(u8, u16)>) -> Vec<(Protocol, u16)> {
    ports.into_iter().filter_map(known).collect()
}

/// Returns a value with its protocol; `None` if the protocol is not one that is translated.
fn known<T>((protocol, what): (u8, T)) -> Option<(Protocol, T)> {
    Some((Protocol::from_ip(protocol)?, what))
}

/// A forward as the kernel translates it, and as it is relayed, if it is; `None`: of no such protocol.
pub(super) fn forward(forward: ForwardSocket) -> Option<(Forward, Option<relay::Forward>)> {
    let protocol = Protocol::from_ip(forward.protocol)?;
    let translated = Forward {
        protocol,
        host: forward.host.ip(),
        host_port: forward.host.port(),
        vm: forward.vm,
        vm_row: forward.vm_row,
        guest_port: forward.guest_port,
        rule: forward.rule,
        is_own: forward.socket.is_none(),
    };
    let relayed = forward.socket.map(|socket| relay::Forward {
        vm: forward.vm,
        protocol,
        guest_port: forward.guest_port,
        rule: forward.rule,
        socket,
    });
    Some((translated, relayed))
}

/// Reads policies that the broker compiled; an error is the broker's fault.
fn reload(policies: Policies) -> io::Result<Reload> {
    let bytes = read_memory_file(policies.policies).map_err(io::Error::other)?;
    Ok(Reload {
        id: policies.id,
        policies: PolicySet::changes_from_bytes(&bytes).map_err(io::Error::other)?,
        local: policies.local,
        vms: policies.vms,
        strictly: policies.strictly,
    })
}

/// A packet has room for each of the answer's texts, whatever rules and names are in them.
fn truncate_texts(answer: WhyAnswer) -> WhyAnswer {
    WhyAnswer {
        rule: truncate_json(answer.rule),
        outcome: truncate_json(answer.outcome),
        explanation: truncate_json(answer.explanation),
        ..answer
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
