'use strict';
{
    const page = document.getElementById('distlock');
    const live = page.querySelector('.distlock-live');

    // As in `core/wording.py`: the two units that say most.
    const span = seconds => {
        const whole = Math.floor(seconds);
        if (whole < 60) return `${whole} s`;
        if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
        if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
        return `${Math.floor(whole / 86400)} d ${Math.floor(whole % 86400 / 3600)} h`;
    };

    // The store's clock, carried on by a clock of ours that nobody sets.
    const elapsed = element => {
        if (element.started === undefined || element.startedAt !== element.dataset.now) {
            element.started = performance.now();
            element.startedAt = element.dataset.now;
        }
        return performance.now() - element.started;
    };

    let standsStill = false;
    const tick = () => {
        // A lease may have been renewed meanwhile: only what was told lately counts down.
        if (standsStill) return;
        for (const bar of page.querySelectorAll('progress[data-end]')) {
            const left = Math.max(0, bar.dataset.end - bar.dataset.now - elapsed(bar));
            bar.value = left;
            const over = left === 0 && page.dataset.over;
            bar.parentElement.querySelector('.text').textContent = over || span(left / 1000);
        }
        for (const age of page.querySelectorAll('time[data-since]')) {
            age.textContent = span((age.dataset.now - age.dataset.since + elapsed(age)) / 1000);
        }
    };
    tick();
    setInterval(tick, 1000);

    for (const button of page.querySelectorAll('[data-copy]')) {
        if (!navigator.clipboard) continue;
        button.hidden = false;
        button.addEventListener('click', async () => {
            await navigator.clipboard.writeText(button.previousElementSibling.textContent);
            button.textContent = button.dataset.done;
        });
    }

    const all = page.querySelector('[data-all]');
    if (all !== null) {
        all.hidden = false;
        all.addEventListener('change', () => {
            for (const box of page.querySelectorAll('input[name=target]')) box.checked = all.checked;
        });
    }

    // Without a script they are always there.
    const acts = page.querySelector('[data-acts]');
    const offer = () => {
        if (acts !== null) acts.hidden = page.querySelector('input[name=target]:checked') === null;
    };
    page.addEventListener('change', offer);
    offer();

    // What has the focus is found again by its name, in the same row or part; else the focus goes
    // to what is around it, and not to the beginning of the page.
    const withFocus = (part, change) => {
        const focused = part.contains(document.activeElement) ? document.activeElement : null;
        const around = part.closest('[tabindex]');
        const row = focused?.closest('[data-row]')?.dataset.row;
        const name = focused?.dataset.focus;
        change();
        if (focused === null || document.activeElement === focused) return;
        const scope = row === undefined ? part
            : [...part.querySelectorAll('[data-row]')].find(each => each.dataset.row === row);
        const again = focused.isConnected ? focused
            : name === undefined ? null : scope?.querySelector(`[data-focus="${name}"]`);
        (again ?? around)?.focus({preventScroll: true});
    };

    const patchCells = (old, fresh) => {
        old.className = fresh.className;
        if (old.dataset.version !== fresh.dataset.version) {
            // Another holder: what was chosen was another lock.
            old.replaceChildren(...fresh.childNodes);
            old.dataset.version = fresh.dataset.version;
            return;
        }
        [...fresh.cells].forEach((cell, position) => {
            const there = old.cells[position];
            if (there.querySelector('input')) return;
            if (there.innerHTML !== cell.innerHTML) there.replaceChildren(...cell.childNodes);
        });
    };

    const patchRows = (body, fresh) => {
        const before = new Map([...body.rows].map(row => [row.dataset.row, row]));
        const stay = new Set([...fresh.rows].map(row => row.dataset.row));
        // First, so that none of the others has to move: to move is to lose the focus.
        for (const row of [...body.rows]) if (!stay.has(row.dataset.row)) row.remove();
        let at = body.firstElementChild;
        for (const row of [...fresh.rows]) {
            const old = before.get(row.dataset.row);
            if (old === undefined) {
                body.insertBefore(row, at);
                continue;
            }
            patchCells(old, row);
            if (old === at) at = at.nextElementSibling;
            else body.insertBefore(old, at);
        }
    };

    const patch = text => {
        const fresh = new DOMParser().parseFromString(text, 'text/html');
        // Something else has answered, such as a login page.
        if (fresh.querySelector('[data-part="rows"]') === null) return false;
        const columns = body => [...body.querySelector('[data-row]:not([data-row=none])')?.cells ?? []]
            .reduce((sum, cell) => sum + cell.colSpan, 0);
        const [ours, theirs] = [page, fresh].map(columns);
        // Somebody's permissions have changed, and with them the table.
        if (ours && theirs && ours !== theirs) window.location.reload();
        for (const part of page.querySelectorAll('[data-part]')) {
            const next = fresh.querySelector(`[data-part="${part.dataset.part}"]`);
            if (next === null) continue;
            withFocus(part, () => {
                if (part.dataset.part === 'rows') patchRows(part, next);
                else if (part.innerHTML !== next.innerHTML) part.replaceChildren(...next.childNodes);
            });
        }
        tick();
        offer();
        return true;
    };

    if (live !== null) {
        const status = live.querySelector('[role=status]');
        const button = live.querySelector('[data-pause]');
        const wording = {on: page.dataset.live, paused: page.dataset.paused, lost: page.dataset.lost, out: page.dataset.out};
        const pause = button.textContent;
        let tag = null, stopped = false, asking = false;

        const say = state => {
            standsStill = state !== 'on';
            live.className = `distlock-live ${state}`;
            if (status.textContent !== wording[state]) status.textContent = wording[state];
        };

        const refresh = async () => {
            if (stopped || asking || document.hidden) return;
            asking = true;
            try {
                const address = new URL(window.location.href);
                address.searchParams.set('live', '1');
                const headers = tag === null ? {} : {'If-None-Match': tag};
                const answer = await fetch(address, {
                    headers, cache: 'no-store', redirect: 'manual', signal: AbortSignal.timeout(15000),
                });
                if (answer.type === 'opaqueredirect' || answer.status === 403) {
                    button.hidden = true;
                    stopped = true;
                    say('out');
                    return;
                }
                const text = await answer.text();
                // Somebody may have paused it meanwhile.
                if (stopped) return;
                if (answer.status !== 304) {
                    if (!answer.ok) throw new Error(answer.status);
                    if (!patch(text)) throw new Error('another page');
                    tag = answer.headers.get('ETag');
                }
                say('on');
            } catch {
                if (!stopped) say('lost');
            } finally {
                asking = false;
            }
        };

        button.addEventListener('click', () => {
            stopped = !stopped;
            button.textContent = stopped ? button.dataset.go : pause;
            if (stopped) say('paused');
            else refresh();
        });
        document.addEventListener('visibilitychange', refresh);
        live.hidden = false;
        say('on');
        setInterval(refresh, page.dataset.refresh * 1000);
    }
}
