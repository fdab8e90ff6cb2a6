//! Handlers of requests: each request becomes a message to the broker, or reads figures.
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fmt::Display,
    os::fd::OwnedFd,
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use hyper::{
    Method, StatusCode, Uri,
    body::Bytes,
    header::{ETAG, HeaderValue},
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use slipgate_ipc::{
    api::ApiRequest,
    client::{
        ClientAnswer, ErrorKind, MachineStatus, PassedOrder, Replaces, Target, Version, VmChange,
        VmStatus,
    },
    engine::{EngineReply, FlowQuestion, Silence},
};
use tokio::sync::Semaphore;

use crate::{
    Figures,
    broker::Broker,
    capture,
    conditions::Conditions,
    events::Events,
    flows,
    machines::{BalloonBody, Machine, Snapshot, SnapshotBody},
    model::{
        Activity, CaptureBody, Cut, FlowsQuery, Health, Policy, PolicyPut, Vm, VmBody, VmPatch,
        Why, WhyQuery, merge,
    },
    openapi,
    problem::{Problem, answer, no_machine, other_answer},
    response::{Content, JSON, OPENMETRICS, Response, empty, json, with},
    routes::{Action, route},
};

/// How often a VM may be changed by others while it is patched.
const MOST_CHANGED_MEANWHILE: usize = 8;
/// Largest number of lists of flows that clients read at a time.
pub(crate) const MOST_FLOW_LISTS: usize = 32;
/// How long a page of metrics is good for.
const FRESH: Duration = Duration::from_secs(1);

/// State that the handlers share.
pub(crate) struct Daemon {
    pub(crate) broker: Broker,
    pub(crate) events: Rc<Events>,
    pub(crate) figures: Box<dyn Figures>,
    /// Room for [`MOST_FLOW_LISTS`].
    pub(crate) flow_lists: Arc<Semaphore>,
    /// Whether clients may change anything.
    pub(crate) may_change: bool,
    /// The page of metrics, and when it was made.
    pub(crate) page: RefCell<Option<(Instant, Bytes)>>,
}

impl Daemon {
    /// The page of metrics. Making one reads every slot, so one is good for [`FRESH`].
    async fn metrics(&self) -> Bytes {
        let made = self.page.borrow().clone();
        if let Some((made, page)) = made
            && made.elapsed() < FRESH
        {
            return page;
        }
        let inventory = self.broker.inventory().await;
        let page = Bytes::from(self.figures.metrics(&inventory));
        *self.page.borrow_mut() = Some((Instant::now(), page.clone()));
        page
    }
}

/// The message to the broker that a change asks for. `None`: the request changes nothing, or needs
/// the VM's present definition first.
///
/// # Errors
/// There is no such request, or its body has another form.
pub fn change_of(
    method: &str,
    path: &str,
    conditions: Conditions<'_>,
    body: &[u8],
) -> Result<Option<ApiRequest>, Problem> {
    let method = Method::from_bytes(method.as_bytes())
        .map_err(|_| Problem::new(StatusCode::BAD_REQUEST, "that is no method"))?;
    let (found, parameter) = route(&method, path)?;
    let input = Input {
        parameter,
        conditions,
        body,
        tap: Cell::default(),
    };
    request_of(found.action, &input)
}

/// Parts of a request that its meaning depends on.
pub(crate) struct Input<'r> {
    /// Value of the path's parameter.
    pub(crate) parameter: &'r str,
    pub(crate) conditions: Conditions<'r>,
    pub(crate) body: &'r [u8],
    /// The descriptor that came with it, until the message to the broker has it.
    pub(crate) tap: Cell<Option<OwnedFd>>,
}

fn request_of(action: Action, input: &Input<'_>) -> Result<Option<ApiRequest>, Problem> {
    let body = input.body;
    let name = || input.parameter.to_owned();
    Ok(Some(match action {
        Action::PutVm => {
            let vm = VmBody::without_state(parsed(body)?, input.parameter);
            let vm = vm.map_err(|e| not_as_described(&e))?;
            let tap = vm.tap.with(input.tap.take())?;
            ApiRequest::PutVm {
                vm: Box::new(vm.named(name())?),
                replaces: input.conditions.parsed()?,
                tap,
            }
        }
        Action::PutPolicy => ApiRequest::PutPolicy {
            name: name(),
            text: text(body)?,
            replaces: input.conditions.parsed()?,
        },
        Action::RemovePolicy => ApiRequest::RemovePolicy {
            name: name(),
            replaces: input.conditions.parsed()?,
        },
        Action::RemoveVm => ApiRequest::RemoveVm { name: name() },
        Action::KeepVm => ApiRequest::KeepVm { name: name() },
        Action::Freeze => ApiRequest::Freeze { vm: name() },
        Action::Thaw => ApiRequest::Thaw { vm: name() },
        Action::Sleep => ApiRequest::Sleep { vm: name() },
        Action::Resume => ApiRequest::Resume { vm: name() },
        Action::CutVm => ApiRequest::Cut {
            what: Target::Vm(name()),
        },
        Action::EndGeneration => ApiRequest::EndGeneration { vm: name() },
        Action::CutFlow => ApiRequest::Cut {
            what: Target::Flow(name()),
        },
        Action::PauseMachine => order(name(), PassedOrder::Pause),
        Action::ResumeMachine => order(name(), PassedOrder::Resume),
        Action::KillMachine => order(name(), PassedOrder::Kill),
        Action::BalloonMachine => {
            let BalloonBody { mib } = parsed(body)?;
            order(name(), PassedOrder::Balloon { mib })
        }
        Action::SnapshotMachine => {
            let SnapshotBody {
                name: to,
                base,
                sleep,
            } = parsed(body)?;
            order(name(), PassedOrder::Snapshot { to, base, sleep })
        }
        Action::CaptureVm => capture_of(Target::Vm(name()), body)?,
        Action::CaptureFlow => capture_of(Target::Flow(name()), body)?,
        Action::PatchVm => {
            parsed::<VmPatch>(body)?;
            return Ok(None);
        }
        _ => return Ok(None),
    }))
}

fn order(vm: String, order: PassedOrder) -> ApiRequest {
    ApiRequest::OrderMachine { vm, order }
}

fn capture_of(what: Target, body: &[u8]) -> Result<ApiRequest, Problem> {
    let CaptureBody { packets, seconds } = match body {
        [] => CaptureBody::default(),
        body => parsed(body)?,
    };
    if packets == Some(0) || seconds == Some(0) {
        let detail = "packets and seconds: give 1 at least, or leave them out";
        return Err(Problem::new(StatusCode::BAD_REQUEST, detail));
    }
    Ok(ApiRequest::Capture {
        what,
        packets,
        seconds,
    })
}

/// Carries out a request other than the one for events.
///
/// # Errors
/// It can't be carried out; the problem says why.
pub(crate) async fn carry_out(
    daemon: &Daemon,
    action: Action,
    uri: &Uri,
    input: &Input<'_>,
) -> Result<Response, Problem> {
    let broker = &daemon.broker;
    let (parameter, body) = (input.parameter, input.body);
    let name = || parameter.to_owned();
    if let Some(request) = request_of(action, input)? {
        if matches!(action, Action::CaptureVm | Action::CaptureFlow) {
            return capture::begin(broker, request, parameter).await;
        }
        let answer = answer(broker.ask(request).await?, parameter)?;
        return changed(answer).ok_or_else(other_answer);
    }
    Ok(match action {
        Action::Health => {
            let health = match answer(broker.ask(ApiRequest::ListVms).await?, "")? {
                ClientAnswer::VmList {
                    vms,
                    room,
                    displaced,
                } => Health::of(&vms, room, displaced),
                _ => return Err(other_answer()),
            };
            json(StatusCode::OK, JSON, &health)
        }
        Action::OpenApi => json(StatusCode::OK, JSON, &openapi::document()),
        Action::ListVms => {
            let listed = vms(broker).await?.into_iter().map(Vm::from);
            let silences = daemon.figures.silences();
            let vms: Vec<Vm> = listed.map(|vm| with_activity(vm, &silences)).collect();
            json(StatusCode::OK, JSON, &vms)
        }
        Action::ListMachines => {
            let machines = machines(broker).await?;
            let machines: Vec<Machine> = machines.into_iter().map(Machine::from).collect();
            json(StatusCode::OK, JSON, &machines)
        }
        Action::GetMachine => {
            let mut machines = machines(broker).await?.into_iter();
            let found = machines.find(|machine| machine.name == parameter);
            let found = found.ok_or_else(|| no_machine(parameter))?;
            json(StatusCode::OK, JSON, &Machine::from(found))
        }
        Action::GetVm => {
            let found = vm(broker, parameter).await?;
            let version = found.definition.version();
            let activity = match broker.silence(parameter, found.id).await {
                Some(silence) => Some(silence),
                // Without its engine's answer, the tables of all VMs have to tell.
                None => daemon.figures.silences().get(&found.id.get()).copied(),
            };
            let vm = Vm {
                activity: activity.map(Activity::from),
                ..Vm::from(found)
            };
            tagged(json(StatusCode::OK, JSON, &vm), version)
        }
        Action::PatchVm => {
            let replaces = input.conditions.parsed()?;
            let answer = patch(broker, parameter, &parsed(body)?, replaces).await?;
            changed(answer).ok_or_else(other_answer)?
        }
        Action::Why => {
            let query: WhyQuery = query(uri)?;
            let question = FlowQuestion {
                address: query.address,
                port: query.port,
                protocol: protocol(query.proto.as_deref())?,
                name: query.name,
            };
            let request = ApiRequest::Why {
                vm: name(),
                question,
            };
            match answer(broker.ask(request).await?, parameter)? {
                ClientAnswer::Engine {
                    reply: EngineReply::Why(why),
                } => json(StatusCode::OK, JSON, &Why::from(why)),
                _ => return Err(other_answer()),
            }
        }
        Action::ListPolicies => json(StatusCode::OK, JSON, &policies(broker).await?),
        Action::GetPolicy => {
            let policies = policies(broker).await?;
            let found = policies.into_iter().find(|policy| policy.name == parameter);
            let found = found.ok_or_else(|| {
                let detail =
                    format!("no policy {parameter:?} was put: GET /v1/policies lists those");
                Problem::new(StatusCode::NOT_FOUND, detail)
            })?;
            let version = Version::of(found.text.as_bytes());
            tagged(json(StatusCode::OK, JSON, &found), version)
        }
        Action::Flows => {
            let FlowsQuery { vm } = query(uri)?;
            let place = daemon.flow_lists.clone().try_acquire_owned();
            let place = place.map_err(|_| {
                let detail = format!("{MOST_FLOW_LISTS} clients read flows already: try again");
                Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
            })?;
            flows::begin(broker, daemon.figures.flows(vm), place).await?
        }
        Action::Stats => {
            let inventory = broker.inventory().await;
            json(StatusCode::OK, JSON, &daemon.figures.stats(&inventory))
        }
        Action::Metrics => {
            let text = daemon.metrics().await;
            with(StatusCode::OK, OPENMETRICS, Content::Whole(Some(text)))
        }
        // Others are changes, and events have a response of their own.
        _ => return Err(other_answer()),
    })
}

/// A VM with what the tables tell of its activity.
fn with_activity(vm: Vm, silences: &BTreeMap<u32, Silence>) -> Vm {
    let activity = silences.get(&vm.id).map(|silence| Activity::from(*silence));
    Vm { activity, ..vm }
}

async fn vms(broker: &Broker) -> Result<Vec<VmStatus>, Problem> {
    match answer(broker.ask(ApiRequest::ListVms).await?, "")? {
        ClientAnswer::VmList { vms, .. } => Ok(vms),
        _ => Err(other_answer()),
    }
}

async fn machines(broker: &Broker) -> Result<Vec<MachineStatus>, Problem> {
    match answer(broker.ask(ApiRequest::ListMachines).await?, "")? {
        ClientAnswer::MachineList { machines } => Ok(machines),
        _ => Err(other_answer()),
    }
}

async fn policies(broker: &Broker) -> Result<Vec<Policy>, Problem> {
    match answer(broker.ask(ApiRequest::ListPolicies).await?, "")? {
        ClientAnswer::PolicyList { policies } => {
            Ok(policies.into_iter().map(Policy::from).collect())
        }
        _ => Err(other_answer()),
    }
}

async fn vm(broker: &Broker, name: &str) -> Result<VmStatus, Problem> {
    let request = ApiRequest::GetVm {
        name: name.to_owned(),
    };
    match answer(broker.ask(request).await?, name)? {
        ClientAnswer::Vm { vm, .. } => Ok(*vm),
        _ => Err(other_answer()),
    }
}

/// Changes a VM by a merge patch. Who has changed it between reading and writing it has the better
/// of us, and the patch is applied to what he has made.
async fn patch(
    broker: &Broker,
    name: &str,
    patch: &Value,
    condition: Replaces,
) -> Result<ClientAnswer, Problem> {
    for _ in 0..MOST_CHANGED_MEANWHILE {
        let now = vm(broker, name).await?;
        let read = now.definition.version();
        if !condition.permits(Some(read)) {
            let detail = format!("{name} has another definition by now: read it again");
            return Err(Problem::new(StatusCode::PRECONDITION_FAILED, detail));
        }
        let mut body = serde_json::to_value(VmBody::from(now.definition)).unwrap_or_default();
        merge(&mut body, patch.clone());
        let body: VmBody = serde_json::from_value(body).map_err(|e| not_as_described(&e))?;
        let request = ApiRequest::PutVm {
            vm: Box::new(body.named(name.to_owned())?),
            replaces: Replaces::AnyOf(vec![read]),
            tap: None,
        };
        let given = broker.ask(request).await?;
        let replaced = matches!(
            given,
            ClientAnswer::Error {
                kind: ErrorKind::Replaced,
                ..
            }
        );
        if !replaced {
            return answer(given, name);
        }
    }
    let detail = format!("{name} is changed all the time: try again");
    Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail))
}

/// A VM, with its definition's version as entity tag.
fn of_vm(status: StatusCode, vm: VmStatus) -> Response {
    let version = vm.definition.version();
    tagged(json(status, JSON, &Vm::from(vm)), version)
}

/// The response to a change that was carried out; `None`: this is no answer to one.
fn changed(answer: ClientAnswer) -> Option<Response> {
    Some(match answer {
        ClientAnswer::Vm { vm, change } => {
            let status = match change {
                VmChange::Created => StatusCode::CREATED,
                VmChange::Changed | VmChange::Unchanged => StatusCode::OK,
            };
            of_vm(status, *vm)
        }
        ClientAnswer::PolicyPut {
            generation,
            version,
            cut,
            kept,
        } => {
            let body = PolicyPut {
                generation,
                cut,
                kept,
            };
            tagged(json(StatusCode::OK, JSON, &body), version)
        }
        ClientAnswer::SnapshotSaved { snapshot } => {
            json(StatusCode::CREATED, JSON, &Snapshot::from(snapshot))
        }
        ClientAnswer::Done => empty(StatusCode::NO_CONTENT),
        ClientAnswer::Engine {
            reply: EngineReply::Cut { flows },
        } => json(StatusCode::OK, JSON, &Cut { flows }),
        _ => return None,
    })
}

/// A response with an entity tag (RFC 9110, section 8.8.3).
fn tagged(mut response: Response, version: Version) -> Response {
    if let Ok(tag) = HeaderValue::from_str(&format!("\"{version}\"")) {
        response.headers_mut().insert(ETAG, tag);
    }
    response
}

fn text(body: &[u8]) -> Result<String, Problem> {
    let text = std::str::from_utf8(body).map(str::to_owned);
    text.map_err(|e| {
        let detail = format!("the body is no text in UTF-8: {e}");
        Problem::new(StatusCode::BAD_REQUEST, detail)
    })
}

fn parsed<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(body).map_err(|e| not_as_described(&e))
}

fn not_as_described(e: &impl Display) -> Problem {
    let detail = format!("the body is not what GET /v1/openapi.json describes: {e}");
    Problem::new(StatusCode::BAD_REQUEST, detail)
}

/// The parameters behind the question mark.
pub(crate) fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, Problem> {
    serde_urlencoded::from_str(uri.query().unwrap_or_default()).map_err(|e| {
        let detail = format!("the parameters can't be used: {e}");
        Problem::new(StatusCode::BAD_REQUEST, detail)
    })
}

/// The number of an IP protocol.
fn protocol(name: Option<&str>) -> Result<u8, Problem> {
    match name {
        None | Some("tcp") => Ok(6),
        Some("udp") => Ok(17),
        Some("icmp") => Ok(1),
        Some(other) => Err(Problem::new(
            StatusCode::BAD_REQUEST,
            format!("proto {other:?}: give tcp, udp or icmp"),
        )),
    }
}
