-- What may be given back of a budget is bounded by what was given (docs/adr/0051-shares.md). Until here whoever could call
-- use_budget could report negative use without end, and so unsay what every tenant had used.
ALTER TABLE query_use
    ADD COLUMN settled double precision[],  -- {requests, tokens, money} used for good; NULL: all of it (a row of before)
    -- Who was given a part of the day's budget and still holds some of it: the digest of a secret that the process alone
    -- knows, and three amounts for each. requests, tokens and money are settled and what all of them hold.
    ADD COLUMN holders bytea[] NOT NULL DEFAULT '{}',
    ADD COLUMN held double precision[] NOT NULL DEFAULT '{}';

-- Adds what was used, takes back what is returned (negative in spent), then gives what is wanted, as far as there is any.
-- secret: whoever is given something of a day names one, and it alone gives that back. holding: how much of what it was given
-- before its holder still holds, requests under way included; the rest is settled, and nobody gives it back any more.
-- What is settled only grows while its span lasts. Amounts that are missing or no numbers are refused.
CREATE FUNCTION settle_budget(
    of_tenant text, of_caller text, of_span text, secret uuid, spent_since timestamptz,
    spent double precision[], holding double precision[], wanted double precision[], most double precision[],
    OUT began timestamptz, OUT given double precision[], OUT used double precision[]
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
    largest  CONSTANT double precision := 1e15;  -- of one amount: below it whole numbers are exact, and no sum overflows
    capacity CONSTANT integer := 100;            -- of holders: who comes later is given as much, and gives nothing back
    known    record;
    final    double precision[];  -- what is settled
    parts    double precision[];  -- what is held
    mine     bytea;
    before   integer;             -- how many amounts of others stand before this holder's; NULL: it holds nothing
    amount   double precision;
    stays    double precision;
    counts   boolean;             -- whether what is reported is of the span that lasts
BEGIN
    IF (spent[1] + spent[2] + spent[3] + holding[1] + holding[2] + holding[3] + wanted[1] + wanted[2] + wanted[3]
        + coalesce(most[1], 0) + coalesce(most[2], 0) + coalesce(most[3], 0) <> 'NaN') IS NOT TRUE
    THEN
        RAISE EXCEPTION 'an amount of a budget is missing or no number' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    began := date_trunc(of_span, clock_timestamp(), 'UTC');
    LOOP
        SELECT q.since, ARRAY[q.requests, q.tokens, q.money] AS used, q.settled, q.holders, q.held INTO known
            FROM query_use q WHERE (q.tenant, q.caller, q.span) = (of_tenant, of_caller, of_span) FOR UPDATE;
        EXIT WHEN FOUND;
        INSERT INTO query_use (tenant, caller, span, since) VALUES (of_tenant, of_caller, of_span, began)
            ON CONFLICT DO NOTHING;
    END LOOP;
    began := greatest(began, known.since);
    IF known.since = began THEN
        used := known.used;
        final := coalesce(known.settled, used);
        parts := known.held;
    ELSE
        used := '{0,0,0}';
        final := used;
        parts := '{}';
        known.holders := '{}';
    END IF;
    given := '{0,0,0}';
    IF of_span = 'day' AND secret IS NOT NULL THEN
        mine := sha256(uuid_send(secret));
        before := 3 * (array_position(known.holders, mine) - 1);
    END IF;

    counts := spent_since IS NULL OR spent_since = began;
    FOR i IN 1..3 LOOP
        IF counts AND spent[i] > 0 THEN
            amount := least(spent[i], largest);
            used[i] := used[i] + amount;
            final[i] := final[i] + amount;
        END IF;
        amount := parts[before + i];
        IF counts AND amount > 0 THEN
            amount := greatest(0, amount + least(spent[i], 0));
            stays := least(amount, greatest(0, holding[i]));
            final[i] := final[i] + (amount - stays);
            parts[before + i] := stays;
            IF spent[i] < 0 THEN  -- added up anew: beside a very large amount smaller ones are lost, and would not come back
                used[i] := final[i] + (
                    SELECT sum(p.amount) FROM unnest(parts) WITH ORDINALITY p (amount, n) WHERE p.n % 3 = i % 3
                );
            END IF;
        END IF;
        CONTINUE WHEN most[i] IS NULL OR wanted[i] <= 0;
        amount := greatest(0, least(wanted[i], most[i] - used[i], largest));
        CONTINUE WHEN amount = 0;
        given[i] := amount;
        used[i] := used[i] + amount;
        IF before IS NULL AND mine IS NOT NULL AND cardinality(known.holders) < capacity THEN
            before := cardinality(parts);
            known.holders := known.holders || mine;
            parts := parts || '{0,0,0}';
        END IF;
        IF before IS NULL THEN
            final[i] := final[i] + amount;
        ELSE
            parts[before + i] := parts[before + i] + amount;
        END IF;
    END LOOP;
    IF parts[before + 1] = 0 AND parts[before + 2] = 0 AND parts[before + 3] = 0 THEN
        known.holders := array_remove(known.holders, mine);
        parts := parts[:before] || parts[before + 4:];
    END IF;
    UPDATE query_use q SET since = began, requests = used[1], tokens = used[2], money = used[3],
            settled = final, holders = known.holders, held = parts
        WHERE (q.tenant, q.caller, q.span) = (of_tenant, of_caller, of_span);
END $$;
REVOKE EXECUTE ON FUNCTION settle_budget FROM PUBLIC;

-- As programs of the version before call it: they name no secret, so what they are given is used for good. When one of
-- them stops, what it held of a budget (a hundredth at most) counts as used until the day ends.
CREATE OR REPLACE FUNCTION use_budget(
    of_tenant text, of_caller text, of_span text, spent_since timestamptz,
    spent double precision[], wanted double precision[], most double precision[],
    OUT began timestamptz, OUT given double precision[], OUT used double precision[]
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
    SELECT s.began, s.given, s.used INTO began, given, used
        FROM settle_budget(of_tenant, of_caller, of_span, NULL, spent_since, spent, '{0,0,0}', wanted, most) s;
END $$;
