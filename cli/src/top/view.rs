//! The screen: a line of totals, VMs, flows, and a line of keys or of a message. 80 columns and 24
//! lines suffice; it has no colours.
use ratatui::{
    buffer::Buffer,
    layout::{Constraint, Layout, Rect},
    style::{Modifier, Style},
    widgets::{Cell, Row, StatefulWidget, Table, TableState, Widget},
};

use super::state::{State, peer};
use crate::{
    args::TopOrder,
    show::{
        flows::Flow,
        stats::VmStats,
        table::{amount, counted, span},
    },
};

/// VMs that are shown.
const MOST_VMS: usize = 5;
/// Width in columns from which on a flow's state and rule are shown.
const WIDE: u16 = 110;

const KEYS: &str = "q quit  r/b/a/n sort  / filter  p pause  arrows select  c cut  f freeze/thaw";

/// Returns the number of lines of a picture with every flow.
pub(super) fn height(state: &State) -> u16 {
    let lines = 6 + state.vms().len().min(MOST_VMS + 1) + state.flows().len();
    u16::try_from(lines).unwrap_or(u16::MAX)
}

/// Draws the screen from the state.
pub(super) fn draw(state: &State, area: Rect, buffer: &mut Buffer) {
    let vms = state.vms();
    let shown = vms.len().min(MOST_VMS);
    let rest = usize::from(vms.len() > shown);
    let heights = [1, 1 + shown + rest, 1].map(|lines| Constraint::Length(lines as u16));
    let [head, vm_area, gap, flow_area, foot] = Layout::vertical([
        heights[0],
        heights[1],
        heights[2],
        Constraint::Fill(1),
        Constraint::Length(1),
    ])
    .areas(area);
    line(&headline(state), head, buffer, Style::new());
    draw_vms(state, &vms, shown, vm_area, buffer);
    let (filter, typing) = state.filter();
    let filter = match (filter, typing) {
        ("", false) => String::new(),
        (text, true) => format!("filter: {text}_"),
        (text, false) => format!("filter: {text}"),
    };
    line(&filter, gap, buffer, Style::new());
    draw_flows(state, flow_area, buffer);
    let foot_text = match state.message() {
        "" => KEYS,
        message => message,
    };
    line(
        foot_text,
        foot,
        buffer,
        Style::new().add_modifier(Modifier::DIM),
    );
}

/// A picture's text, line by line.
pub(super) fn text(buffer: &Buffer) -> String {
    let area = buffer.area;
    let rows = (area.top()..area.bottom()).map(|y| {
        let cells = (area.left()..area.right()).map(|x| buffer[(x, y)].symbol());
        let row: String = cells.collect();
        row.trim_end().to_owned() + "\n"
    });
    rows.collect()
}

fn line(text: &str, area: Rect, buffer: &mut Buffer, style: Style) {
    // A terminal may have no room for it.
    if area.is_empty() {
        return;
    }
    buffer.set_stringn(area.x, area.y, text, usize::from(area.width), style);
}

fn headline(state: &State) -> String {
    let vms = state.vms();
    let (tx, rx) = vms.iter().fold((0, 0), |(tx, rx), vm| {
        let rates = state.vm_rate(vm);
        (tx + rates.tx, rx + rates.rx)
    });
    let order = match state.order() {
        TopOrder::Rate => "rate",
        TopOrder::Bytes => "bytes",
        TopOrder::Age => "age",
        TopOrder::Name => "name",
    };
    let paused = if state.is_paused() { "  PAUSED" } else { "" };
    format!(
        "slipgate top  {}  {}  tx {}B/s  rx {}B/s  by {order}{paused}",
        counted(vms.len() as u64, "VM"),
        counted(state.flows().len() as u64, "flow"),
        amount(tx),
        amount(rx),
    )
}

fn draw_vms(state: &State, vms: &[&VmStats], shown: usize, area: Rect, buffer: &mut Buffer) {
    let widths = [16, 8, 8, 8, 9, 9, 9].map(Constraint::Length);
    let head = ["VM", "FLOWS", "TX/s", "RX/s", "DROPPED", "REFUSED", "STATE"];
    let mut rows: Vec<Row<'_>> = vms[..shown]
        .iter()
        .map(|vm| {
            let rates = state.vm_rate(vm);
            let dropped = vm.drops.values().map(|count| count.packets).sum();
            let frozen = state.is_frozen(&vm.vm);
            cells([
                vm.vm.clone(),
                right(
                    &(vm.flows + vm.relayed.map_or(0, |r| r.flows)).to_string(),
                    8,
                ),
                right(&amount(rates.tx), 8),
                right(&amount(rates.rx), 8),
                right(&amount(dropped), 9),
                right(&amount(vm.refused.values().sum()), 9),
                if frozen { "frozen" } else { "" }.into(),
            ])
        })
        .collect();
    if vms.len() > shown {
        rows.push(Row::new([Cell::new(format!(
            "and {} more",
            vms.len() - shown
        ))]));
    }
    let head = [head[0].into()]
        .into_iter()
        .chain((1..6).map(|i| right(head[i], if i < 4 { 8 } else { 9 })))
        .chain([head[6].into()]);
    let table = Table::new(rows, widths).header(bold(head));
    Widget::render(table, area, buffer);
}

fn draw_flows(state: &State, area: Rect, buffer: &mut Buffer) {
    let flows = state.flows();
    let wide = area.width >= WIDE;
    let mut widths: Vec<Constraint> = [10, 5, 6].map(Constraint::Length).into();
    widths.push(Constraint::Fill(3));
    widths.extend([7, 7, 7, 6].map(Constraint::Length));
    let mut head: Vec<String> = ["VM", "PROTO", "PORT", "TO"].map(str::to_owned).into();
    head.extend(["TX/s", "RX/s", "BYTES"].map(|title| right(title, 7)));
    head.push(right("AGE", 6));
    if wide {
        widths.extend([Constraint::Length(11), Constraint::Fill(2)]);
        head.extend(["STATE", "RULE"].map(str::to_owned));
    }
    let rows = flows.iter().map(|flow| cells(row(state, flow, wide)));
    let table = Table::new(rows, widths)
        .header(bold(head))
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut place = TableState::new().with_selected(state.selected(&flows));
    StatefulWidget::render(table, area, buffer, &mut place);
}

fn row(state: &State, flow: &Flow, wide: bool) -> Vec<String> {
    let rates = state.flow_rate(flow);
    let mut row = vec![
        flow.vm.to_string(),
        flow.proto.into(),
        flow.guest.port().to_string(),
        peer(flow),
        right(&amount(rates.tx), 7),
        right(&amount(rates.rx), 7),
        right(&amount(flow.tx_bytes + flow.rx_bytes), 7),
        right(&span(flow.age_ms), 6),
    ];
    if wide {
        row.extend([flow.state.to_string(), flow.rule.to_string()]);
    }
    row
}

fn cells(texts: impl IntoIterator<Item = String>) -> Row<'static> {
    Row::new(texts.into_iter().map(Cell::new))
}

fn bold(texts: impl IntoIterator<Item = String>) -> Row<'static> {
    cells(texts).style(Style::new().add_modifier(Modifier::BOLD))
}

fn right(text: &str, width: usize) -> String {
    format!("{text:>width$}")
}
